"""Recovery: a compressed model is trained for minutes, until its predictions are close to those of the original model.

`loop` trains, `learned` holds the weights that learn, `teacher` the predictions of the original model, and `divergence`
the loss. The loop knows no method; `distil` is the method.
"""
