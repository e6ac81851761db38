//! What monitoring is shown over HTTP: `/metrics`, and for Kubernetes' probes `/healthz` and `/readyz`.
//!
//! HTTP is spoken by a thread of its own (`http`), so that a scraper costs the core two snapshots per second at most,
//! one at a time, and nothing while it is slow (`scrape`). The core answers questions over a channel (`gather`); whatever may
//! take long (family tables, `/proc`, `/sys`) is read by helpers, which also turn the snapshot into series (`show`,
//! `connections`, `pods`) and these into text (`text`).

mod connections;
pub(crate) mod gather;
pub(crate) mod http;
mod machine;
mod pods;
mod scrape;
mod show;
mod text;
