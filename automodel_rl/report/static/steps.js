"use strict";
// A section that shows something of one step of a run, which a slider chooses.

class StepSection {
  // `steps` names the run's list of steps that have something to show; `load` gives what a run has of a step.
  constructor(section, title, steps, load) {
    this.section = section;
    this.named = steps;
    this.load = load;
    this.run = 0;
    this.step = null;  // null: the newest
    const head = section.appendChild(make("h2", "", title));
    head.onclick = () => section.classList.toggle("closed");
    this.bar = section.appendChild(make("div", "bar"));
    this.runs = this.bar.appendChild(make("select"));
    this.runs.onchange = () => { this.run = Number(this.runs.value); this.step = null; this.show(); };
    this.slider = this.bar.appendChild(make("input"));
    this.slider.type = "range";
    this.slider.setAttribute("aria-label", "step");
    this.slider.oninput = () => { this.step = this.steps[this.slider.value]; this.show(); };
    this.label = this.bar.appendChild(make("span"));
  }

  get steps() { return this.data[this.run][this.named] || []; }

  get shownStep() { return this.step ?? this.steps[this.steps.length - 1]; }

  // What is shown: if it is the same as before, nothing is drawn anew, so that open texts stay open while a run goes on.
  get key() { return `${this.run} ${this.shownStep}`; }

  update(data) {
    this.data = data;
    const having = data.map((run, number) => [run, number]).filter(([run]) => (run[this.named] || []).length);
    this.section.hidden = !having.length;
    if (!having.length) return;
    if (!this.steps.length) this.run = having[0][1];
    this.runs.hidden = having.length < 2;
    this.runs.replaceChildren(...having.map(([run, number]) => {
      const option = make("option", "", run.name);
      option.value = number;
      option.selected = number === this.run;
      return option;
    }));
    this.show();
  }

  async show() {
    const step = this.shownStep, key = this.key;
    this.slider.max = this.steps.length - 1;
    this.slider.value = this.steps.indexOf(step);
    this.label.textContent = `step ${step}`;
    if (key === this.shownKey) return;
    this.shownKey = key;
    const found = await this.load(this.run, step);
    if (key === this.shownKey) this.draw(found);
  }
}
