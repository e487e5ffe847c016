"""What some tests need, and are skipped without."""

from importlib.util import find_spec

import pytest

needs_nemo = pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="needs nemo_automodel: the extra nemo")
