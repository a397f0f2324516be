//! The node as pod-sync reports it: addresses, resources, runtime state, the Node object.
//!
//! Futures that the caller spawns, each until its `stop`:
//! - [`poll_runtime`] asks the runtime for its Status and publishes
//!   [`RuntimeState`](pod_sync_layout::RuntimeState) on a `watch` channel.
//! - [`NodeCgroups::keep`] writes the limits of the node's cgroups again.
//! - [`ProcessCgroups::keep`] moves processes into the cgroups of the configuration.
//! - [`poll_images`] lists images for `Node.status.images`.
//! - [`follow_addresses`] keeps the node's addresses up to date, in [`NodeIps`](pod_sync_layout::NodeIps) and
//!   on a `watch` channel.
//! - [`follow_pod_cidrs`] and [`set_pod_cidrs`] send the pod CIDRs to the runtime.
//! - [`keep_chains`] makes chains of iptables for other components.
//! - [`report_node`] reads these channels ([`NodeChannels`]) and reports the Node to status-reporter.
//!
//! [`decide_name`] decides whether another machine uses the name of the node.
//!
//! The rest are functions of [`NodeSettings`](pod_sync_layout::NodeSettings) and of files below `/proc` and
//! `/sys`.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod addresses;
mod iptables;
mod machine;
mod machine_checks;
mod node_cgroups;
mod node_name;
mod object;
mod pod_cidrs;
mod process_cgroups;
mod report;
mod reservations;
mod resources;
mod runtime;
mod status;

pub use crate::addresses::{AddressesError, check_addresses, follow_addresses, initial_addresses};
pub use crate::iptables::{CommandEnd, IpFamily, Iptables, SystemIptables, keep_chains};
pub use crate::machine::huge_pages;
pub use crate::machine_checks::{Machine, MachineError, MachineRules, MachineWarning, has_tmpfs_noswap};
pub use crate::node_cgroups::{EnforcementError, NodeCgroups};
pub use crate::node_name::{MachineIds, NameDecision, NodeNameTaken, SeenRenewal, decide_name};
pub use crate::object::{managed_node, node_object};
pub use crate::pod_cidrs::{follow_pod_cidrs, set_pod_cidrs};
pub use crate::process_cgroups::ProcessCgroups;
pub use crate::report::{NodeChannels, report_node};
pub use crate::reservations::{
    EnforcedReservation, RESERVABLE, ReservationError, ReservationFields, Reservations,
};
pub use crate::resources::{allocatable, capacity, cpus, max_pods, online_cpus, pod_limits, swap_bytes};
pub use crate::runtime::poll_runtime;
pub use crate::status::{declared_features, poll_images};
