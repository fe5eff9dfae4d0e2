"""Faults put into training on purpose, to see that nothing but time is lost.

    make test-faults                            all of it, some forty minutes on two cores
    python -m tests.faults.kills --kills 50           SIGKILL at random moments; runs that the script starts again
    python -m tests.faults.kills --torchrun --kills 6 the same under torchrun --max-restarts, which starts them again
    python -m tests.faults.others                     signals, a full disk, a read-only folder, damaged checkpoints

Every fault ends with the same question: does the run that went on end with the parameters, and with every row of
metrics.jsonl, of one that nobody disturbed, to the last bit? Exit code 1 if anything differs. Not a part of CI: a short
version is in test_kills.py.

    runs.py     starts a run, and says what its stages are at; compares two runs
    kills.py    one training, killed again and again
    others.py   the other faults, one training each
"""
