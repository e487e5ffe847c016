"""Audio of chats: tokens and spectrograms are those of the model's own processor, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2AudioProcessor,
    SeamlessM4TFeatureExtractor,
)

from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.media import MediaReaders, open_readers
from automodel_rl.data.messages import Chat
from automodel_rl.errors import InputError
from automodel_rl.hf.read import read_config
from automodel_rl.media.audio import AudioReader
from tests.audio import make_hearing_workspace, tone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_workspace(tmp_path_factory.mktemp("audio"), num_chats=1) / "model"


def audio_of(folder: Path, config: PretrainedConfig | None = None) -> AudioReader:
    found = open_readers(folder, read_config(folder) if config is None else config)
    assert found is not None
    reader = found.by_part_type["audio"]
    assert isinstance(reader, AudioReader)
    return reader


@pytest.fixture(scope="module")
def reader(model: Path) -> AudioReader:
    return audio_of(model)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("num_samples", [1120, 1121, 4000, 4160, 15999, 16000])
def test_a_clip_is_what_transformers_processor_makes_of_it(
    model: Path, reader: AudioReader, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, num_samples: int
) -> None:
    wave = np.random.default_rng(num_samples).uniform(-0.5, 0.5, num_samples).astype(np.float32)
    soundfile.write(tmp_path / "noise.wav", wave, 16000, subtype="FLOAT")
    processor = Qwen2AudioProcessor(AutoFeatureExtractor.from_pretrained(model), tokenizer, tokenizer.chat_template)
    parts = [{"type": "audio"}, {"type": "text", "text": "What is this?"}, {"type": "audio"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is low."}]
    text = processor.apply_chat_template(chat)
    expected = processor(text=text, audio=[wave, wave], sampling_rate=16000, return_tensors="pt")
    named = [{**part, "path": str(tmp_path / "noise.wav")} if part["type"] == "audio" else part for part in parts]
    write = ChatTokenizer(tokenizer, "all", MediaReaders({"audio": reader}))
    sequence = write(Chat([{"role": "user", "content": named}, chat[1]]), "here")
    assert sequence.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]).startswith("It is low.")
    for number, clip in enumerate(sequence.media):
        assert torch.equal(clip.load(), expected["input_features"][number])
        assert clip.size == (int(expected["feature_attention_mask"][number].sum()),)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (22050, 2), (48000, 1)])
def test_other_sampling_rates_and_channels_give_the_same_tone(
    reader: AudioReader, tmp_path: Path, rate: int, channels: int
) -> None:
    tone(tmp_path / "tone.wav", 400, 0.5, 16000)
    tone(tmp_path / "other.wav", 400, 0.5, rate, channels)
    one, other = (reader(str(tmp_path / f"{name}.wav"), "here") for name in ("tone", "other"))
    assert (one.num_frames, one.num_tokens) == (other.num_frames, other.num_tokens) == (50, 12)
    waves = [reader.samples(str(tmp_path / f"{name}.wav"), "here") for name in ("tone", "other")]
    assert np.abs(waves[0] - waves[1])[400:-400].max() < 0.01


def test_a_clip_travels_light(reader: AudioReader, tmp_path: Path) -> None:
    tone(tmp_path / "tone.wav", 400, 0.5, 16000)
    assert len(pickle.dumps(reader(str(tmp_path / "tone.wav"), "here"))) < 1000


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (1.2, "audio of 1.2 s, but the model takes at most 1 s: cut the file"),
        (0.03, "audio of 0.03 s is shorter than 2 tokens"),
    ],
)
def test_a_clip_of_a_length_that_the_model_cannot_hear_is_refused(
    reader: AudioReader, tmp_path: Path, seconds: float, message: str
) -> None:
    tone(tmp_path / "tone.wav", 400, seconds, 16000)
    with pytest.raises(InputError, match=f"chats.jsonl:2: {message}"):
        reader(str(tmp_path / "tone.wav"), "chats.jsonl:2")


def test_damaged_files_are_named(reader: AudioReader, tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(InputError, match="chats.jsonl:3: cannot read the audio .*text.wav.*use an intact file"):
        reader(str(tmp_path / "text.wav"), "chats.jsonl:3")
    with pytest.raises(InputError, match="audio is a dict: use the path of a file, or its bytes"):
        reader({"array": [0.0]}, "here")


@pytest.mark.parametrize("ending", ["flac", "ogg", "mp3"])
def test_compressed_files_are_read(reader: AudioReader, tmp_path: Path, ending: str) -> None:
    tone(tmp_path / f"tone.{ending}", 400, 0.5, 16000)
    clip = reader(str(tmp_path / f"tone.{ending}"), "here")
    assert clip.num_tokens == 12
    assert reader.samples(str(tmp_path / f"tone.{ending}"), "here").std() == pytest.approx(0.5 / 2**0.5, rel=0.02)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_a_file_that_is_cut_off_is_refused(reader: AudioReader, tmp_path: Path, ending: str) -> None:
    """Whoever reads it: libraries fill up some formats with silence, or take what is there."""
    tone(tmp_path / f"tone.{ending}", 400, 0.9, 16000)
    whole = (tmp_path / f"tone.{ending}").read_bytes()
    with pytest.raises(InputError, match="x:1: .*use an intact file"):
        reader(whole[: len(whole) // 2], "x:1").load()


def test_samples_that_are_no_numbers_are_refused(reader: AudioReader, tmp_path: Path) -> None:
    wave = np.zeros(8000, dtype=np.float32)
    wave[100] = np.nan
    soundfile.write(tmp_path / "nan.wav", wave, 16000, subtype="FLOAT")
    with pytest.raises(InputError, match="x:1: the audio .*nan.wav has NaN or infinite samples"):
        reader(str(tmp_path / "nan.wav"), "x:1").load()


def test_a_file_that_does_not_tell_its_length_is_refused(reader: AudioReader, tmp_path: Path) -> None:
    tone(tmp_path / "tone.flac", 400, 0.5, 16000)
    stream = bytearray((tmp_path / "tone.flac").read_bytes())
    stream[21] &= 0xF0  # the number of samples in the first block, 36 bits
    stream[22:26] = bytes(4)
    with pytest.raises(InputError, match="x:1: the audio in its bytes does not contain its length: rewrite the file"):
        reader(bytes(stream), "x:1")


def test_a_feature_extractor_of_another_kind_is_refused(model: Path, tmp_path: Path) -> None:
    SeamlessM4TFeatureExtractor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is a SeamlessM4TFeatureExtractor, not a WhisperFeatureExtractor"):
        audio_of(tmp_path, read_config(model))


def test_a_feature_extractor_of_another_model_is_refused(model: Path) -> None:
    config = read_config(model)
    config.audio_config.max_source_positions = 1500
    with pytest.raises(InputError, match="makes 8 mels of 100 frames, but the encoder takes 8 of 3000"):
        audio_of(model, config)


@pytest.mark.parametrize("num_samples", [1120, 4160, 15901, 16000])
def test_a_clip_of_any_length_is_cut_from_what_the_processor_fills_up(tmp_path: Path, num_samples: int) -> None:
    model = make_hearing_workspace(tmp_path, "qwen2_5_omni_thinker", num_chats=1) / "model"
    wave = np.random.default_rng(num_samples).uniform(-0.5, 0.5, num_samples).astype(np.float32)
    soundfile.write(tmp_path / "noise.wav", wave, 16000, subtype="FLOAT")
    clip = audio_of(model)(str(tmp_path / "noise.wav"), "here")
    whole = AutoFeatureExtractor.from_pretrained(model)(
        wave, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    heard = int(whole["attention_mask"].sum())
    assert clip.size == (heard,)
    torch.testing.assert_close(clip.load(), whole["input_features"][0, :, :heard], rtol=0, atol=1e-6)
