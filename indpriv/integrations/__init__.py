"""A recorded run in other training loops and trackers; these are imported only when used.

`metrics`: what may be sent to a tracker, and a line on the terminal during training. `callbacks`:
for the Trainer of Hugging Face Transformers and for Lightning. In every loop the training call is
inside the block of `Recorder.attach`.
"""
