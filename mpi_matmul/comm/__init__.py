"""Messages between ranks: the contract, its two worlds (threads, MPI), and what is built on it."""
