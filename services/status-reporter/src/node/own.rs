//! Whether the Node is that of this machine.
//!
//! Until it is, this service leaves the Node, its Lease and its CSINode alone: an agent on another machine
//! may use the name, and pod-sync decides about that.

use serde_json::Value;
use tokio::sync::watch;

use crate::status::text;

/// Waits until the Node is that of this machine, there is none, or it cannot be read from a server that
/// answers.
pub async fn wait(mut is_free: watch::Receiver<bool>) {
    // An error means that the keeper of the Node has ended, as this task is about to.
    let _ = is_free.wait_for(|is_free| *is_free).await;
}

/// IDs of this machine that a service without root can read. The ID of the boot is that of the host in a
/// container, too.
#[derive(Debug, Clone)]
pub struct LocalMachine {
    machine: String,
    boot: String,
}

impl LocalMachine {
    // Blocks: at the start.
    /// Reads the IDs.
    #[must_use]
    pub fn read() -> Self {
        let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
        Self { machine: machine.trim().to_owned(), boot: quintlet_kit::boot::boot_id() }
    }

    /// Returns whether a Node has an ID of this machine, or no ID.
    #[must_use]
    pub fn has(&self, node: &Value) -> bool {
        let info = &node["status"]["nodeInfo"];
        let (machine, boot) = (text(info, "machineID"), text(info, "bootID"));
        let is_known = |id: &str, own: &str| !id.is_empty() && id == own;
        (machine.is_empty() && boot.is_empty())
            || is_known(machine, &self.machine)
            || is_known(boot, &self.boot)
    }
}

/// Returns whether two Nodes have an ID of a machine in common.
#[must_use]
pub fn is_same(one: &Value, other: &Value) -> bool {
    let info = &other["status"]["nodeInfo"];
    let other =
        LocalMachine { machine: text(info, "machineID").to_owned(), boot: text(info, "bootID").to_owned() };
    other.has(one)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_with_one_id_of_this_machine_or_none_at_all_is_that_of_this_machine() {
        let own = LocalMachine { machine: "m".to_owned(), boot: "b".to_owned() };
        let node = |machine: &str, boot: &str| json!({"status": {"nodeInfo": {"machineID": machine, "bootID": boot}}});
        for (machine, boot, want) in [
            ("m", "b", true),
            ("m", "b2", true),
            ("m2", "b", true),
            ("m2", "b2", false),
            ("", "b2", false),
            ("", "", true),
        ] {
            assert_eq!(own.has(&node(machine, boot)), want, "{machine} {boot}");
        }
        assert!(own.has(&json!({})), "a Node that was just registered");
        assert!(is_same(&node("m2", "b2"), &node("m2", "b3")));
        assert!(!is_same(&node("m2", "b2"), &node("m", "b3")));
        assert!(!is_same(&node("m2", "b2"), &json!({})), "facts without a machine");
    }
}
