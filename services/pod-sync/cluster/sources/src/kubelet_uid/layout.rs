//! Layouts of the internal types by release of Kubernetes.

/// A minor version of the kubelet whose UIDs of static pods are known.
///
/// Older kubelets hash by MD5 (`pkg/kubelet/config: applyDefaults`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KubeletVersion {
    /// Kubernetes 1.35.
    V1_35,
    /// Kubernetes 1.36.
    V1_36,
    /// Kubernetes 1.37.
    V1_37,
}

impl KubeletVersion {
    /// All known versions, in ascending order.
    pub const ALL: [Self; 3] = [Self::V1_35, Self::V1_36, Self::V1_37];
    /// The version of a new node: the one that Quintlet reports.
    pub const NEWEST: Self = Self::V1_37;

    /// Returns the version with this name, such as `1.36`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.name() == name)
    }

    /// Returns the minor version, such as `1.36`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V1_35 => "1.35",
            Self::V1_36 => "1.36",
            Self::V1_37 => "1.37",
        }
    }
}

/// The versions that have a type or a field.
#[derive(Debug, Clone, Copy)]
struct Versions {
    since: KubeletVersion,
    until: KubeletVersion,
}

impl Versions {
    const ALL: Self = Self { since: KubeletVersion::V1_35, until: KubeletVersion::NEWEST };

    fn has(self, version: KubeletVersion) -> bool {
        self.since <= version && version <= self.until
    }
}

/// A Go struct.
#[derive(Debug)]
pub(super) struct Structure {
    /// Name with its package, such as `core.Pod`.
    pub(super) name: &'static str,
    fields: &'static [Field],
    versions: Versions,
}

/// A field of a Go struct.
#[derive(Debug)]
pub(super) struct Field {
    /// Go name.
    pub(super) name: &'static str,
    /// JSON key, empty for an embedded struct whose fields are in the same object.
    pub(super) key: &'static str,
    /// Go type with its package, as `reflect` prints it, such as `*core.Probe`.
    pub(super) go_type: &'static str,
    versions: Versions,
}

pub(super) const fn structure(name: &'static str, fields: &'static [Field]) -> Structure {
    Structure { name, fields, versions: Versions::ALL }
}

pub(super) const fn field(name: &'static str, key: &'static str, go_type: &'static str) -> Field {
    Field { name, key, go_type, versions: Versions::ALL }
}

impl Structure {
    pub(super) const fn since(mut self, version: KubeletVersion) -> Self {
        self.versions.since = version;
        self
    }

    pub(super) const fn until(mut self, version: KubeletVersion) -> Self {
        self.versions.until = version;
        self
    }

    /// Returns whether the version has the struct.
    pub(super) fn is_in(&self, version: KubeletVersion) -> bool {
        self.versions.has(version)
    }

    /// Returns the fields that a version has, in order.
    pub(super) fn fields(&self, version: KubeletVersion) -> impl Iterator<Item = &'static Field> + use<> {
        self.fields.iter().filter(move |field| field.versions.has(version))
    }
}

impl Field {
    pub(super) const fn since(mut self, version: KubeletVersion) -> Self {
        self.versions.since = version;
        self
    }

    pub(super) const fn until(mut self, version: KubeletVersion) -> Self {
        self.versions.until = version;
        self
    }
}
