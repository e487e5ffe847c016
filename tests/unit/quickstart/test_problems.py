"""The problems of the quick start: their answers are right, and held-out questions are not trained."""

import re

from automodel_rl.quickstart import calculator, problems


def test_answers_are_the_last_number_of_the_working_and_right() -> None:
    made, _ = problems.make_problems(200, 0, seed=1)
    for problem in made:
        question, worked = (message["content"] for message in problem["messages"])
        x, y = map(int, re.findall(r"\d+", question))
        assert problems.as_prompt(problem)["answer"] == str(x + y if " + " in worked else x - y)


def test_no_held_out_question_is_trained() -> None:
    for make in (problems.make_problems, calculator.make_products):
        train, held_out = make(150, 40, 0)
        questions = [{chat["messages"][0]["content"] for chat in chats} for chats in (train, held_out)]
        assert [len(train), len(held_out)] == [150, 40]
        assert questions[0].isdisjoint(questions[1])
        assert make(150, 40, 0) == (train, held_out)
        assert make(150, 40, 1) != (train, held_out)
