"""What each member is given in an epoch is what its load promises, in every epoch and for every source."""
