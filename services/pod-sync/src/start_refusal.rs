//! Reasons to stop that are found after the start.

use pod_sync_node_object::{EnforcementError, NodeNameTaken};
use quintlet_agents::NodeIdentity;

use crate::args::Args;

/// A reason to stop that is found after the start.
#[derive(Debug)]
pub(crate) enum StartRefusal {
    /// A reservation that must be enforced cannot be.
    Enforcement(EnforcementError),
    /// An agent on another machine has the name of the node.
    NodeName(NodeNameTaken),
}

/// Returns the node in its cluster; none without an API server.
pub(crate) fn node_identity(args: &Args) -> Option<NodeIdentity> {
    args.node.kubeconfig.as_deref().map(|path| NodeIdentity::new(&args.node.node_name(), path))
}
