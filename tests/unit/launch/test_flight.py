"""What a rank did last is known while it lives and after its end."""

from pathlib import Path

import pytest

from automodel_rl.errors import MicrobatchError
from automodel_rl.launch.flight import NUM_LINES, FlightRecorder, flight, in_microbatch, last_phase, read_flight


def test_the_file_has_the_last_notes_and_where_the_rank_was(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    with recorder.top_phase("loading"):
        pass
    file = tmp_path / "flight" / "rank_3.log"
    recorder.record_in(file)
    for step in range(NUM_LINES):
        with recorder.top_phase(f"step {step}"), recorder.phase("train"):
            assert recorder.where == f"step {step}, train"
    assert len(read_flight(file)) == NUM_LINES
    assert last_phase(file) == ""  # between two steps
    with pytest.raises(ValueError, match="planted"), recorder.top_phase("step 7"), recorder.phase("data"):
        raise ValueError("planted")
    assert last_phase(file) == recorder.where == "step 7, data"
    with recorder.top_phase("step 8"):
        assert recorder.where == "step 8"
    recorder.discard()
    assert not file.parent.exists()


def test_a_second_recording_takes_the_place_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.log"
    first, second = FlightRecorder(), FlightRecorder()
    first.record_in(file)
    second.record_in(file)
    with first.phase("of the first"), second.phase("of the second"):
        assert last_phase(file) == "of the second"


def test_a_recorder_without_a_place_notes_in_memory(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    (tmp_path / "file").write_text("")
    recorder.record_in(tmp_path / "file" / "rank_0.log")
    with recorder.phase("train"):
        assert recorder.where == "train"
    assert recorder.file is None


def test_work_on_a_microbatch_is_named_where_it_fails() -> None:
    with pytest.raises(MicrobatchError, match="loss of microbatch 2 on stage 1 failed: ValueError: planted"):
        with in_microbatch("loss", 1, 2):
            raise ValueError("planted")
    assert flight.where.endswith("loss of microbatch 2 on stage 1")
