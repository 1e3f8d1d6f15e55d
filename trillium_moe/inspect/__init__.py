"""Looking inside a trained model: each module has functions that return data, and one for each that draws it.

    walk         the model run sublayer by sublayer, every input and output at hand
    memory       KDA: half-lives, write strength, norm and effective rank of the state along a document
    depth        attention residuals' weights, output norms and gradient norms by depth
    experts      load, co-activation, mutual information with the domain, churn
    attention    MLA: entropy of every head, and what its queries take from a span
    activations  maxima before and after the activation

Models are `infer.generate.LoadedModel`s; data are NumPy arrays.
"""
