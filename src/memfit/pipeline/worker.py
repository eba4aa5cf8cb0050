"""The process that predicts for a GPU: `python fake_cuda.py memfit.pipeline.worker REQUEST REPLY TOLD`."""

import sys

from memfit.pipeline.remote import main

if __name__ == "__main__":
    main(*sys.argv[1:])
