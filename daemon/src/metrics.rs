//! What monitoring is shown over HTTP: `/metrics`, and for Kubernetes' probes `/healthz` and `/readyz`.
//!
//! HTTP is spoken by a thread of its own (`http`), so that a scraper costs the core one snapshot per second at most and
//! nothing while it is slow. The core answers questions over a channel (`gather`); whatever may take long (family tables,
//! `/proc`) is read by helpers. The thread turns the snapshot into series (`show`, `connections`, `pods`) and these into text (`text`).

mod connections;
pub(crate) mod gather;
pub(crate) mod http;
mod machine;
mod pods;
mod show;
mod text;
