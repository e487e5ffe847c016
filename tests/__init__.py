import os

# Threads of OpenBLAS would be missing in processes that tests fork. `make` sets it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
