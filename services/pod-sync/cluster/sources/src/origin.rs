//! Where a manifest comes from.

use pod_sync_layout::SourceKind;

/// Origin of a manifest, which is part of the pod's UID.
#[derive(Debug, Clone, Copy)]
pub struct ManifestOrigin<'a> {
    pub kind: SourceKind,
    /// File path or URL.
    pub place: &'a str,
    pub node: &'a str,
}
