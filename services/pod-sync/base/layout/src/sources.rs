//! Where desired pods come from.

/// A source of pods (`pkg/kubelet/types: FileSource`, `HTTPSource`, `ApiserverSource`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceKind {
    /// Manifest directory or file.
    File,
    /// Manifests behind a URL.
    Http,
    /// Pods that the API server has bound to the node.
    Api,
}

impl SourceKind {
    /// Returns the value of the annotation `kubernetes.io/config.source`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }
}

/// An error in a source or one of its manifests that the user has to fix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestProblem {
    /// File or URL of the manifest.
    pub origin: String,
    /// Path of the invalid field, if any.
    pub field: String,
    /// Text for the user, which names the problem.
    pub message: String,
}
