//! Where a manifest comes from.

use pod_sync_layout::SourceKind;

/// Origin of a manifest, which is part of the pod's UID.
#[derive(Debug, Clone, Copy)]
pub struct ManifestOrigin<'a> {
    /// File or HTTP.
    pub kind: SourceKind,
    /// File path or URL.
    pub place: &'a str,
    /// Name of the node, which is the suffix of the pod's name.
    pub node: &'a str,
}
