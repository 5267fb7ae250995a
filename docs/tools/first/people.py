import numpy as np
import pandas as pd

rng = np.random.default_rng()
people = pd.DataFrame(
    rng.normal(size=(2000, 5)), columns=["age", "hours", "school", "gain", "loss"]
)
people["income"] = (people["age"] + rng.normal(size=2000) > 0).astype(int)
people.to_csv("people.csv", index=False)
