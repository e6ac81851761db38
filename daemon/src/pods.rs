//! Pods whose containers get the shim: what a pod asks for, what its containers are given, and which there are.
//!
//! The container runtime asks before it makes a container (NRI, crate `underpass_nri`), on a thread of its own: what the
//! daemon is busy with must not delay a pod. Whatever goes wrong, the container is made, without the shim, and
//! `underpass pods` says why.

pub(crate) mod known;
pub mod place;
pub mod policy;
pub(crate) mod runtime;
