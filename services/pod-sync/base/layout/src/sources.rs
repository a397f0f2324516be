//! Where desired pods come from.

/// A source of pods (`pkg/kubelet/types: FileSource`, `HTTPSource`, `ApiserverSource`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceKind {
    /// Manifest directory or file.
    File,
    Http,
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
    pub origin: String,
    /// Path of the invalid field, if any.
    pub field: String,
    pub message: String,
}
