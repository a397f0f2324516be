//! Intended differences from the histories of a kubelet.

use quintlet_recordings::compare::Difference;

/// An intended difference.
pub(crate) struct Known {
    /// Name of the scenario; `*` for all.
    pub(crate) scenario: &'static str,
    /// Path of the field; a component `*` matches any.
    pub(crate) path: &'static str,
    /// Reason for the difference.
    pub(crate) reason: &'static str,
}

/// All intended differences. One that no longer occurs fails the test.
pub(crate) const KNOWN: &[Known] = &[
    Known {
        scenario: "*",
        path: "statuses/*/conditions/PodReadyToStartContainers/reason",
        reason: "the condition says why it is False, as in kubelet 1.37",
    },
    Known {
        scenario: "*",
        path: "statuses/*/conditions/PodReadyToStartContainers/message",
        reason: "the condition says why it is False, as in kubelet 1.37",
    },
    Known {
        scenario: "host-path-late",
        path: "events/0/message",
        reason: "the message says that the path does not exist, as in kubelet 1.37",
    },
    Known {
        scenario: "host-path-of-wrong-type",
        path: "events/0/message",
        reason: "the message names the type that was found, as in kubelet 1.37",
    },
];

/// Returns whether `known` describes this difference.
pub(crate) fn matches(known: &Known, scenario: &str, difference: &Difference) -> bool {
    let (want, got): (Vec<&str>, Vec<&str>) =
        (known.path.split('/').collect(), difference.path.split('/').collect());
    !known.reason.is_empty()
        && (known.scenario == "*" || known.scenario == scenario)
        && want.len() == got.len()
        && want.iter().zip(&got).all(|(w, g)| *w == "*" || w == g)
}
