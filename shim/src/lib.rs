//! The shim.
