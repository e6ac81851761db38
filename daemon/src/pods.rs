//! Pods whose containers get the shim: which there are, and the conversation with the container runtime. What a pod asks
//! for and what its containers are given is decided in crate `underpass_pods`.
//!
//! The container runtime asks before it makes a container (NRI, crate `underpass_nri`), on a thread of its own: what the
//! daemon is busy with must not delay a pod. Whatever goes wrong, the container is made, without the shim, and
//! `underpass pods` says why.

mod in_place;
pub(crate) mod known;
pub(crate) mod runtime;
pub(crate) mod unused;
