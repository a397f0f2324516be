//! Histories: the sequence of statuses, events and driver calls of a pod, in a scenario that changes the
//! world around the pod.
//!
//! [`scenario`] reads a scenario, [`run`] carries it out against any API server and node agent, [`observe`]
//! collects what the API server delivers, and [`normal`] removes values that differ between runs.

pub mod normal;
pub mod observe;
pub mod run;
pub mod scenario;
