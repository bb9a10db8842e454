"""What can be done to a job on purpose: each kind of fault behind one interface."""
