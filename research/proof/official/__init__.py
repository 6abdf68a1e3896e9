"""One batch through the code that the papers' authors published and through ours.

::

    theirs/<owner>/<name>@<commit>  ──►  a function, cut out of its file when this runs ──►  their masks, weights, losses, tables
    a data set of our program       ──►  stillhouse.views, stillhouse.noise             ──►  ours: equal, or the line of theirs that is why not

Nothing of theirs lies in this repository: what is kept in docs/proof/official.json are names of functions, numbers of lines, and differences.
``python -m official --list`` (in research/proof) says which commits are needed, ``--theirs FOLDER`` runs.
"""
