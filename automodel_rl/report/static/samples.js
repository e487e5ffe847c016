"use strict";
// Completions: groups of one step with their rewards, and completions of held-out prompts.

function make(kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function shown(value) {
  if (typeof value !== "number") return String(value);
  const isWhole = Number.isInteger(value) || Math.abs(value) >= 1000;
  return isWhole ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
}

// A text that is folded if it is long. Blank lines in a row are drawn as one.
function folded(content) {
  const box = make("div", "fold");
  const text = box.appendChild(make("pre"));
  if (typeof content === "string") text.textContent = content.replace(/\n\s*\n(\s*\n)+/g, "\n\n") || "(empty)";
  else text.append(...content);
  requestAnimationFrame(() => box.classList.toggle("long", box.scrollHeight > box.clientHeight + 4));
  box.onclick = () => { if (!getSelection().toString()) box.classList.add("open"); };
  return box;
}

// Messages as the assistant and others wrote them.
function messagesOf(messages) {
  return messages.map((message) => {
    const turn = make("span", `turn ${message.role}`);
    turn.append(make("span", "label", `${message.role}${message.name ? " " + message.name : ""}\n`));
    const calls = (message.tool_calls || []).map((call) => `→ ${call.function.name} ${asText(call.function.arguments)}`);
    const thoughts = message.reasoning_content ? [`(${message.reasoning_content.trim()})`] : [];
    turn.append([...thoughts, message.content || "", ...calls].filter(Boolean).join("\n") + "\n");
    return turn;
  });
}

function asText(value) { return typeof value === "string" ? value : JSON.stringify(value); }

// The last turns of the assistant, so many, and what answered them. What comes before belongs to the prompt.
function turnsOf(messages, count) {
  const places = [...messages.keys()].filter((place) => messages[place].role === "assistant");
  return messagesOf(messages.slice(count ? places.at(-count) : messages.length));
}

// An agent's episode as a tree: a turn below the one that it follows, and a branch for each way in which a history went on.
function treeOf(tree) {
  const children = new Map();
  tree.forEach((turn, number) => {
    const parent = turn.parent === null ? -1 : turn.parent;
    children.set(parent, [...(children.get(parent) || []), number]);
  });
  const branch = (first, box) => {
    for (let number = first; number !== null;) {
      const turn = tree[number];
      const element = box.appendChild(make("div", turn.trained ? "node" : "node untrained"));
      const head = element.appendChild(make("div", "chips"));
      if (turn.reason) head.appendChild(make("span", "chip fork", turn.kind === "root" ? `new history: ${turn.reason}` : turn.reason));
      head.appendChild(make("span", "chip", turn.trained ? `${turn.tokens} tokens trained` : `${turn.tokens} tokens excluded`));
      head.appendChild(make("span", "chip", `${turn.context} context tokens`));
      element.appendChild(folded(messagesOf(turn.messages)));
      const next = children.get(number) || [];
      number = next.length === 1 ? next[0] : null;
      if (next.length > 1) next.forEach((child) => branch(child, box.appendChild(make("div", "branch"))));
    }
  };
  const box = make("div", "tree");
  const roots = children.get(-1) || [];
  roots.forEach((root) => branch(root, roots.length > 1 ? box.appendChild(make("div", "branch")) : box));
  return box;
}

// Tokens on a ground that says how far the model's log-probability is from the generator's: blue above, orange below.
// Tokens that the generator did not sample are faint: they are not trained.
function coloured(tokens) {
  return tokens.map(([text, sampled, own]) => {
    if (sampled === null) return make("span", "token given", text);
    const span = make("span", "token", text);
    const difference = own === null ? 0 : own - sampled;
    const strength = Math.min(1, Math.abs(difference) / 0.5);
    if (strength > 0.02) span.style.background = difference > 0 ? `rgba(37,99,235,${strength / 2})` : `rgba(232,113,10,${strength / 2})`;
    span.title = `log-probability ${shown(sampled)}, of the model ${own === null ? "not computed" : shown(own)}`;
    return span;
  });
}

function chip(text, value, isSigned) {
  const kind = !isSigned || !value ? "" : value > 0 ? " plus" : " minus";
  return make("span", `chip${kind}`, `${text} ${shown(value)}`);
}

function completionCard(completion) {
  const card = make("div", "card completion");
  const chips = card.appendChild(make("div", "chips"));
  chips.appendChild(chip("reward", completion.reward, true));
  if (completion.advantage !== undefined) chips.appendChild(chip("advantage", completion.advantage, true));
  const parts = Object.entries(completion.rewards || {});
  if (parts.length > 1) parts.forEach(([name, value]) => chips.appendChild(chip(name, value)));
  Object.entries(completion.metrics || {}).forEach(([name, value]) => chips.appendChild(chip(name, value)));
  chips.appendChild(chip("tokens", completion.tokens));
  if (completion.generator) chips.appendChild(make("span", "chip", completion.generator));
  if (completion.staleness) chips.appendChild(chip("versions old", completion.staleness));
  if (completion.finish !== "stop") chips.appendChild(make("span", "chip minus", completion.finish));
  if (completion.messages) {
    chips.appendChild(chip("turns", completion.turns.turns));
    chips.appendChild(chip("calls", completion.turns.calls));
    if (completion.turns.rows > 1) chips.appendChild(chip("rows", completion.turns.rows));
    if (completion.end !== "done") chips.appendChild(make("span", "chip minus", `ended by ${completion.end}`));
  }
  card.appendChild(textOf(completion, chips));
  (completion.errors || []).forEach((error) => card.appendChild(make("div", "label failed", error)));
  return card;
}

// The text of a completion, once: a conversation's turns, or its tokens in their place if a button among the chips is on.
function textOf(completion, chips) {
  const tokens = () => folded(coloured(completion.pieces));
  if (completion.tree && completion.tree.length) return treeOf(completion.tree);
  if (!completion.messages) return completion.pieces ? tokens() : folded(completion.completion);
  const turns = () => folded(turnsOf(completion.messages, completion.turns.turns));
  let text = turns();
  if (completion.pieces) {
    const button = chips.appendChild(make("button", "", "tokens"));
    button.onclick = () => {
      const next = button.classList.toggle("on") ? tokens() : turns();
      text.replaceWith(next);
      text = next;
    };
  }
  return text;
}

const FILTERS = {
  "all groups": () => true,
  "rewards differ": (group) => new Set(group.completions.map((c) => c.reward)).size > 1,
  "all rewarded": (group) => group.completions.every((c) => c.reward > 0),
  "none rewarded": (group) => group.completions.every((c) => c.reward <= 0),
  "with errors": (group) => group.completions.some((c) => (c.errors || []).length || c.finish === "error"),
};

// The section with the groups of a step.
class Rollouts extends StepSection {
  constructor(section, load) {
    super(section, "Rollouts", "steps_with_rollouts", load);
    this.filter = this.bar.appendChild(make("select"));
    Object.keys(FILTERS).forEach((name) => this.filter.appendChild(make("option", "", name)));
    this.filter.onchange = () => this.show();
    this.least = this._limit(this.bar, "reward from");
    this.most = this._limit(this.bar, "to");
    this.groups = section.appendChild(make("div"));
  }

  get key() { return `${super.key} ${this.filter.value} ${this.least.value} ${this.most.value}`; }

  _limit(bar, text) {
    const label = bar.appendChild(make("label", "", `${text} `));
    const input = label.appendChild(make("input"));
    input.type = "number";
    input.step = "any";
    input.style.width = "5.5em";
    input.oninput = () => this.show();
    return input;
  }

  draw(groups) {
    const [least, most] = [this.least, this.most].map((input) => (input.value === "" ? null : Number(input.value)));
    const isWithin = (c) => (least === null || c.reward >= least) && (most === null || c.reward <= most);
    const found = groups.filter(FILTERS[this.filter.value])
      .map((group) => ({ ...group, completions: group.completions.filter(isWithin) }))
      .filter((group) => group.completions.length);
    this.groups.replaceChildren(...found.map((group) => {
      const element = make("div", "group");
      const prompt = element.appendChild(make("div", "prompt"));
      prompt.appendChild(folded(group.prompt));
      const row = element.appendChild(make("div", "row"));
      group.completions.forEach((completion) => row.appendChild(completionCard(completion)));
      return element;
    }));
    if (!found.length) this.groups.replaceChildren(make("p", "faint", "no completion of this step is like that"));
  }
}

function showSamples(section, runs) {
  const having = runs.filter((run) => (run.samples || []).length);
  section.hidden = !having.length;
  const title = make("h2", "", "Samples");
  title.onclick = () => section.classList.toggle("closed");
  section.replaceChildren(title, ...having.flatMap((run) => {
    const where = (runs.length > 1 ? `${run.name}, ` : "") + `after step ${run.samples[0].step}`;
    return [make("p", "faint", where), ...run.samples.map((sample) => {
      const group = make("div", "group");
      group.appendChild(make("div", "prompt")).appendChild(folded(sample.prompt));
      const row = group.appendChild(make("div", "row"));
      for (const [name, text] of [["model", sample.completion], ["data", sample.expected]]) {
        const card = row.appendChild(make("div", "card"));
        card.appendChild(make("div", "label", name));
        card.appendChild(folded(text));
      }
      return group;
    })];
  }));
}

// Sequences of the training data; what is trained of them has a ground.
function showExamples(section, runs) {
  const having = runs.filter((run) => (run.examples || []).length);
  section.hidden = !having.length;
  const title = make("h2", "", "Training data");
  title.onclick = () => section.classList.toggle("closed");
  section.replaceChildren(title, ...having.flatMap((run) => run.examples.map((example) => {
    const group = make("div", "group");
    const where = (runs.length > 1 ? `${run.name}, ` : "") + `${example.where}, ${shown(example.num_tokens)} tokens`;
    group.appendChild(make("div", "label", example.note ? `${where}; ${example.note}` : where));
    const pieces = example.stretches.map(([text, isTrained]) => make("span", isTrained ? "trained" : "given", text));
    if (example.cut) pieces.push(make("span", "given", `✂${example.cut}`));
    group.appendChild(folded(pieces));
    return group;
  })));
}
