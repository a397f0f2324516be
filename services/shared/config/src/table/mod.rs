//! The one table of all fields and flags: what each may hold, its default, its flags, and what comes of it here.
//!
//! Help, `--print-config`, the warnings at start and `docs/migration.md` all read it; tests hold it against the list of
//! the kubelet's fields and against the services' command lines.

mod flags;
mod gates;
mod kubelet;
mod quintlet;

pub use flags::{FLAGS, FlagRow, FlagVerdict};
pub use gates::{CHECKPOINTS, CRASH_LOOP_MAX, DEFAULTS, GATES, Gate, SETTABLE, SPLIT_STREAMS};
pub use kubelet::KUBELET;
pub use quintlet::QUINTLET;

use crate::kind::Kind;
use crate::node::{Data, Node};

/// A process that reads the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// Owner of the runtime's socket.
    CriProxy,
    /// The node's HTTPS API.
    NodeApi,
    /// Cache of what the runtime says.
    Pleg,
    /// Probes.
    Probe,
    /// Writes to the API server.
    StatusReporter,
    /// Decides.
    PodSync,
}

impl Service {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::CriProxy, Self::NodeApi, Self::Pleg, Self::Probe, Self::StatusReporter, Self::PodSync];

    /// Its name: of its binary or, for the node API, of cri-proxy's subcommand.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CriProxy => "cri-proxy",
            Self::NodeApi => "node-api",
            Self::Pleg => "pleg-service",
            Self::Probe => "probe-service",
            Self::StatusReporter => "status-reporter",
            Self::PodSync => "pod-sync",
        }
    }
}

/// What comes of a field.
#[derive(Debug, Clone, Copy)]
pub enum Verdict {
    /// It has its effect.
    Honoured {
        /// The effect, in a few words.
        effect: &'static str,
        /// In these services.
        by: &'static [Service],
        /// Names of tests that show it.
        shown_by: &'static [&'static str],
    },
    /// It has none yet; named in a warning at start when it is set to anything but what happens anyway.
    NotYet {
        /// Who will have it, and so who warns.
        by: Service,
        /// The value for which nothing is missing, as YAML; nothing: there is none.
        now: Option<&'static str>,
    },
    /// Nothing starts with any value but the default.
    Refused {
        /// Why.
        why: &'static str,
    },
    /// It never has an effect; a value that is not the default is warned of.
    Ignored {
        /// Who warns.
        by: Service,
        /// Why.
        why: &'static str,
    },
}

/// A field.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Path in its document, `a.b`.
    pub field: &'static str,
    /// What it may hold.
    pub kind: Kind,
    /// Its default as YAML; empty: not set.
    pub default: &'static str,
    /// The kubelet's flag for it, without dashes.
    pub kubelet_flag: Option<&'static str>,
    /// Our flag for it, where that is not the kubelet's.
    pub own_flag: Option<&'static str>,
    /// Zero and nothing are values of their own; in other fields they mean the default.
    pub zero_counts: bool,
    /// Its value is not shown.
    pub secret: bool,
    /// What comes of it.
    pub verdict: Verdict,
}

impl Row {
    /// The flag our services have for it.
    #[must_use]
    pub fn flag(&self) -> Option<&'static str> {
        self.own_flag.or(self.kubelet_flag)
    }

    /// The services with this flag.
    #[must_use]
    pub fn services(&self) -> &'static [Service] {
        match self.verdict {
            Verdict::Honoured { by, .. } => by,
            Verdict::NotYet { .. } | Verdict::Refused { .. } | Verdict::Ignored { .. } => &[],
        }
    }

    /// Its default value; none where it is not set.
    #[must_use]
    pub fn default_node(&self) -> Option<Node> {
        if self.default.is_empty() {
            None
        } else {
            Some(self.kind.canonical(crate::yaml::value(self.default)))
        }
    }

    const fn new(field: &'static str, kind: Kind, default: &'static str) -> Self {
        Self {
            field,
            kind,
            default,
            kubelet_flag: None,
            own_flag: None,
            zero_counts: false,
            secret: false,
            verdict: Verdict::Refused { why: "" },
        }
    }

    const fn kubelet_flag(mut self, flag: &'static str) -> Self {
        self.kubelet_flag = Some(flag);
        self
    }

    const fn own_flag(mut self, flag: &'static str) -> Self {
        self.own_flag = Some(flag);
        self
    }

    const fn zero_counts(mut self) -> Self {
        self.zero_counts = true;
        self
    }

    const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    const fn honoured(
        mut self,
        by: &'static [Service],
        effect: &'static str,
        shown_by: &'static [&'static str],
    ) -> Self {
        self.verdict = Verdict::Honoured { effect, by, shown_by };
        self
    }

    const fn not_yet(mut self, by: Service, now: Option<&'static str>) -> Self {
        self.verdict = Verdict::NotYet { by, now };
        self
    }

    const fn refused(mut self, why: &'static str) -> Self {
        self.verdict = Verdict::Refused { why };
        self
    }

    const fn ignored(mut self, by: Service, why: &'static str) -> Self {
        self.verdict = Verdict::Ignored { by, why };
        self
    }
}

/// The two kinds of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// `kubelet.config.k8s.io/v1beta1`, `KubeletConfiguration`.
    Kubelet,
    /// `quintlet.dev/v1alpha1`, `QuintletConfiguration`.
    Quintlet,
}

impl Document {
    /// Both, in the order they are printed in.
    pub const ALL: [Self; 2] = [Self::Kubelet, Self::Quintlet];

    /// Its `kind`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Kubelet => "KubeletConfiguration",
            Self::Quintlet => "QuintletConfiguration",
        }
    }

    /// Its `apiVersion`.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Kubelet => "kubelet.config.k8s.io/v1beta1",
            Self::Quintlet => "quintlet.dev/v1alpha1",
        }
    }

    /// Its fields.
    #[must_use]
    pub fn rows(self) -> &'static [Row] {
        match self {
            Self::Kubelet => KUBELET,
            Self::Quintlet => QUINTLET,
        }
    }

    /// One of its fields.
    #[must_use]
    pub fn row(self, field: &str) -> Option<&'static Row> {
        self.rows().iter().find(|r| r.field == field)
    }
}

/// Whether nothing is missing for a value of a field that has no effect yet.
#[must_use]
pub fn is_now(now: Option<&str>, kind: &Kind, value: &Node) -> bool {
    let same = now.is_some_and(|now| kind.canonical(crate::yaml::value(now)).equals(value));
    // An empty map or list asks for nothing.
    same || matches!(&value.data, Data::Map(m) if m.is_empty())
        || matches!(&value.data, Data::List(l) if l.is_empty())
}
