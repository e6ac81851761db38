//! The benchmarks and the demo: real programs over kernel TCP, a Unix socket, and Underpass, in the
//! same run, beside what the machine's memory could do at most; and between two machines.

pub mod cases;
pub mod lab;
pub mod limit;
pub mod load;
pub mod report;
