//! The gRPC clients of pod-sync.
//!
//! | client | service | what it keeps |
//! |---|---|---|
//! | [`Runtime`] | cri-proxy | the pods whose calls broke with the connection ([`BrokenCalls`]) |
//! | [`Pleg`] | pleg-service | the latest runtime state of every pod |
//! | [`Probes`] | all instances of probe-service | the probe target of every pod, and what its probes remember |
//! | [`Statuses`] | status-reporter | the latest status of every pod, until it is acknowledged |
//! | [`NodeVolumes`] | status-reporter | the CSI drivers, the volumes in use and the attachments of the node |
//! | [`Events`] | status-reporter | the last 1,000 events, for `quintctl explain`; unsent events, also in a file ([`UnsentEvents`]) |
//!
//! Tasks: `events` sends events; [`Pleg::follow`], [`Probes::run`], [`Statuses::run`], [`NodeVolumes::run`]
//! and [`NodeVolumes::follow_node`] are futures that the caller spawns, and `Probes::run` spawns one
//! `probe-driver` per instance. Channels: the receiver of [`ProbeFailure`]s, and one stream per peer. A full
//! queue of events drops and counts new ones; statuses and targets are maps with the latest value per pod.
//!
//! A client needs no peer when it is made. It connects when the socket appears, and retries every 100 ms. A
//! change of a pod wakes the worker of that pod through [`WorkerWakeups`].

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod broken_calls;
#[cfg(test)]
mod event_reasons;
mod events;
mod node_volumes;
mod pleg;
mod probes;
mod requests;
mod runtime;
mod status;
mod unsent;
mod wakeups;

pub use crate::broken_calls::BrokenCalls;
pub use crate::events::{EventNumber, EventType, Events, RecordedEvent, record_setup_failure};
pub use crate::node_volumes::{NodeCsiDriver, NodeCsiDrivers, NodeVolumes, NodeVolumesState};
pub use crate::pleg::{ObserveError, Observed, Pleg, PlegHealthError};
pub use crate::probes::{PodMemory, ProbeFailure, Probes};
pub use crate::requests::{LAG, NoIdentity, REQUEST_TIMEOUT, RequestError, may_be_lag, retry_on_lag};
pub use crate::runtime::{CallError, ExecOutput, Runtime, RuntimeMountPoints, WritableLayer};
pub use crate::status::{MirrorError, NodeReportError, StatusAck, Statuses};
pub use crate::unsent::UnsentEvents;
pub use crate::wakeups::WorkerWakeups;
