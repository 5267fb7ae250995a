"""A recorded run in other people's loops and trackers; nothing here imports them until it is asked to.

`metrics`: what may be sent to a tracker, and a line on the terminal while a run trains. `callbacks`: for the Trainer of
Hugging Face Transformers and for Lightning. In every loop the block of `Recorder.attach` stands around the training call.
"""
