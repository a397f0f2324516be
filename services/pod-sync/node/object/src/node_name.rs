//! Decides whether an agent on another machine uses the name of this node: plain functions.
//!
//! A kubelet starts whatever the Node is, and two agents of one name overwrite each other's statuses and run
//! each pod twice.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;

use crate::machine;

/// `spec.leaseDurationSeconds` of a Lease without it, the default of the kubelet.
const LEASE_SECONDS: u32 = 40;

/// IDs of a machine, as `Node.status.nodeInfo` has them. An empty ID is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineIds {
    /// ID of the installation; machines that were made from one image may have the same one.
    pub machine: String,
    /// UUID in the firmware.
    pub system: String,
    /// ID of the boot.
    pub boot: String,
}

impl MachineIds {
    /// Returns the IDs of the machine with this root directory.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        Self {
            machine: machine::machine_id(root),
            system: machine::system_uuid(root),
            boot: quintlet_kit::boot::boot_id(),
        }
    }

    /// Returns whether `other` is certainly another machine. A reboot, a change of hardware or another
    /// installation changes some IDs of a machine, and an image has the ID of its installation, so all IDs
    /// must be known and must differ.
    fn is_other_than(&self, other: &Self) -> bool {
        let pairs =
            [(&self.machine, &other.machine), (&self.system, &other.system), (&self.boot, &other.boot)];
        pairs
            .iter()
            .all(|(own, other)| !own.is_empty() && !other.is_empty() && !own.eq_ignore_ascii_case(other))
    }
}

/// An agent on another machine renews the Lease of this node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the node name {name} is that of an agent that runs on another machine, version {version} at {address} (machine ID {}, system UUID \
     {}): stop it, or choose another --node-name",
    ids.machine, ids.system
)]
pub struct NodeNameTaken {
    /// Name of the node.
    pub name: String,
    /// IDs of the other machine.
    pub ids: MachineIds,
    /// Version of the kubelet that the Node has.
    pub version: String,
    /// First address of the Node.
    pub address: String,
}

/// A renewal of the Lease by another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenRenewal {
    /// Time of the renewal, by the clock of the other machine.
    pub renewed: Timestamp,
    /// Time since this machine has seen it first.
    pub ago: Duration,
}

/// The use of the node name, from one read of Node and Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameDecision {
    /// No agent on another machine is alive under this name.
    Free,
    /// The Node is that of another machine, whose agent was alive at this renewal. It may have ended since.
    /// Node and Lease are read again: a later renewal shows that the agent runs, and a Lease that expires
    /// shows that it does not.
    Doubtful(Timestamp),
    /// The agent of the other machine has renewed the Lease while this machine waited.
    Taken(Box<NodeNameTaken>),
}

/// Returns the use of the node name. `seen` is the renewal that an earlier decision found doubtful.
#[must_use]
pub fn decide_name(
    own: &MachineIds,
    node: Option<&Node>,
    lease: Option<&Lease>,
    seen: Option<SeenRenewal>,
    now: Timestamp,
) -> NameDecision {
    let (Some(node), Some(lease)) = (node, lease.and_then(|lease| lease.spec.as_ref())) else {
        return NameDecision::Free;
    };
    let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    let (Some(info), Some(renewed)) = (info, lease.renew_time.as_ref().map(|time| time.0)) else {
        return NameDecision::Free;
    };
    let ids = MachineIds {
        machine: info.machine_id.clone(),
        system: info.system_uuid.clone(),
        boot: info.boot_id.clone(),
    };
    if !own.is_other_than(&ids) {
        return NameDecision::Free;
    }
    let seconds = lease.lease_duration_seconds.and_then(|seconds| u32::try_from(seconds).ok());
    let duration = Duration::from_secs(seconds.unwrap_or(LEASE_SECONDS).into());
    // A renewal in the future of this clock has the age 0, and expires by the time that this machine waits.
    let age = Duration::try_from(now.duration_since(renewed)).unwrap_or_default();
    match seen {
        Some(seen) if seen.renewed != renewed => {
            let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
            let address = addresses.and_then(|addresses| addresses.first());
            NameDecision::Taken(Box::new(NodeNameTaken {
                name: node.metadata.name.clone().unwrap_or_default(),
                ids,
                version: info.kubelet_version.clone(),
                address: address.map_or_else(|| "an unknown address".to_owned(), |a| a.address.clone()),
            }))
        }
        Some(seen) if seen.ago >= duration => NameDecision::Free,
        Some(_) | None if age >= duration => NameDecision::Free,
        Some(_) | None => NameDecision::Doubtful(renewed),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus, NodeSystemInfo};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

    use super::*;

    fn ids(text: &str) -> MachineIds {
        let mut ids = text.split(' ').map(|id| id.trim_matches('-').to_owned());
        let mut next = || ids.next().unwrap();
        MachineIds { machine: next(), system: next(), boot: next() }
    }

    fn node(text: &str) -> Node {
        let ids = ids(text);
        let info = NodeSystemInfo {
            machine_id: ids.machine,
            system_uuid: ids.system,
            boot_id: ids.boot,
            kubelet_version: "v1.36.2".to_owned(),
            ..NodeSystemInfo::default()
        };
        let address = NodeAddress { address: "10.0.0.5".to_owned(), type_: "InternalIP".to_owned() };
        Node {
            metadata: ObjectMeta { name: Some("n1".to_owned()), ..ObjectMeta::default() },
            status: Some(NodeStatus {
                node_info: Some(info),
                addresses: Some(vec![address]),
                ..NodeStatus::default()
            }),
            ..Node::default()
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn lease(renewed: i64) -> Lease {
        let spec = LeaseSpec {
            renew_time: Some(MicroTime(at(renewed))),
            lease_duration_seconds: Some(40),
            ..LeaseSpec::default()
        };
        Lease { spec: Some(spec), ..Lease::default() }
    }

    fn decide(own: &str, other: &str, renewed: i64, seen: Option<(i64, u64)>) -> NameDecision {
        let seen =
            seen.map(|(renewed, ago)| SeenRenewal { renewed: at(renewed), ago: Duration::from_secs(ago) });
        decide_name(&ids(own), Some(&node(other)), Some(&lease(renewed)), seen, at(100))
    }

    #[test]
    fn a_name_is_free_unless_every_id_is_that_of_another_machine() {
        for (own, other, why) in [
            ("m s b", "m s b", "a restart, or a kubelet on this machine"),
            ("m s b2", "m s b", "a reboot"),
            ("m s2 b2", "m s b", "an image that was restored on another machine"),
            ("m2 s b2", "m s b", "another installation of the same machine"),
            ("m2 s2 b", "m s b", "a container with an ID of its own"),
            ("m2 S b2", "m s b", "a UUID in capitals"),
            ("- s2 b2", "m s b", "no ID in a container"),
            ("m2 s2 b2", "- - -", "a Node without status"),
        ] {
            assert_eq!(decide(own, other, 99, None), NameDecision::Free, "{why}");
            assert_eq!(decide(own, other, 99, Some((90, 9))), NameDecision::Free, "{why}");
        }
        let own = ids("m2 s2 b2");
        assert_eq!(decide_name(&own, None, Some(&lease(99)), None, at(100)), NameDecision::Free);
        assert_eq!(decide_name(&own, Some(&node("m s b")), None, None, at(100)), NameDecision::Free);
    }

    #[test]
    fn a_name_of_another_machine_is_taken_once_its_lease_is_renewed_and_free_once_it_expires() {
        let decide = |renewed, seen| decide("m2 s2 b2", "m s b", renewed, seen);
        assert_eq!(decide(60, None), NameDecision::Free, "the Lease has expired");
        assert_eq!(decide(61, None), NameDecision::Doubtful(at(61)));
        assert_eq!(decide(61, Some((61, 38))), NameDecision::Doubtful(at(61)));
        assert_eq!(decide(5000, Some((5000, 39))), NameDecision::Doubtful(at(5000)), "a clock that is ahead");
        assert_eq!(decide(5000, Some((5000, 40))), NameDecision::Free, "no renewal for the whole duration");
        let NameDecision::Taken(taken) = decide(71, Some((61, 10))) else { panic!("a renewal") };
        assert_eq!(
            taken.to_string(),
            "the node name n1 is that of an agent that runs on another machine, version v1.36.2 at 10.0.0.5 (machine ID m, system \
             UUID s): stop it, or choose another --node-name"
        );
    }
}
