//! Nothing: the package is its test, `tests/two_daemons`. It has a package of its own so that it can be optimised although
//! the daemon is not. What takes a seed's time is optimised with it: the daemon's logic across nodes is generic over verbs,
//! and is compiled where it gets the simulated ones.
