"""Commands of the ``jaxtrain`` program, one file each."""
