"""``jaxtrain prepare``: makes data that runs read, once, on any number of machines."""
