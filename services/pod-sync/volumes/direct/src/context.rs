//! What volumes are made from, beside their pod.

use std::sync::Arc;

use jiff::Timestamp;
use pod_sync_layout::{NodeSettings, ObjectSource, TokenSource};

use crate::certificates::TrustAnchors;

/// External inputs of volumes.
#[derive(Clone)]
pub struct VolumeContext {
    /// ConfigMaps and Secrets.
    pub objects: Arc<dyn ObjectSource>,
    /// Service account tokens; `None` without an API server.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Certificates of ClusterTrustBundles; `None` without an API server, and while the feature gate is off.
    pub trust_anchors: Option<Arc<dyn TrustAnchors>>,
    /// Directories and settings of the node.
    pub node: Arc<NodeSettings>,
    /// Wall time, for the names of versions and the expiry of tokens.
    pub now: Timestamp,
}
