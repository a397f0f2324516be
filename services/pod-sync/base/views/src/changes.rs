//! Decides whether a view has changed for its readers.

use std::sync::Arc;

use crate::view::{PodView, Waiting};

/// Largest difference of two ends of one wait. Each is computed from two clocks, which are read one after the
/// other.
const JITTER_NS: u64 = 100_000_000;

impl Waiting {
    /// Keeps the start of a wait that continues: the one before has the same reason and container.
    pub fn continue_from(&mut self, before: Option<&Self>) {
        if let Some(before) = before
            && before.reason == self.reason
            && before.container == self.container
        {
            self.since_unix_ns = before.since_unix_ns;
        }
    }

    /// Returns whether two waits look the same to a reader.
    fn looks_like(&self, other: &Self) -> bool {
        self.reason == other.reason
            && self.message == other.message
            && self.container == other.container
            && self.until_unix_ns.abs_diff(other.until_unix_ns) < JITTER_NS
    }
}

/// Returns whether a reader of `old` learns nothing from `new`.
#[must_use]
pub fn is_same_view(old: &PodView, new: &PodView) -> bool {
    let is_same_wait = match (&old.waiting, &new.waiting) {
        (Some(old), Some(new)) => old.looks_like(new),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    };
    (Arc::ptr_eq(&old.pod, &new.pod) || old.pod == new.pod)
        && old.status == new.status
        && old.deletion == new.deletion
        && old.worker == new.worker
        && is_same_wait
        && old.decision == new.decision
        && old.resource_version == new.resource_version
        && old.mirror_uid == new.mirror_uid
}

#[cfg(test)]
mod tests {
    use pod_sync_layout::SourceKind;
    use quintlet_model::ids::{PodRef, PodUid};

    use super::*;

    fn wait(reason: &str, container: &str, until_unix_ns: i64) -> Waiting {
        Waiting {
            reason: reason.to_owned(),
            container: container.to_owned(),
            until_unix_ns,
            since_unix_ns: 7,
            ..Waiting::default()
        }
    }

    #[test]
    fn a_wait_that_continues_keeps_its_start() {
        for (before, since) in [
            (Some(wait("CrashLoop", "a", 1)), 7),
            (Some(wait("CrashLoop", "b", 1)), 9),
            (Some(wait("Volumes", "a", 1)), 9),
            (None, 9),
        ] {
            let mut new = Waiting { since_unix_ns: 9, ..wait("CrashLoop", "a", 2) };
            new.continue_from(before.as_ref());
            assert_eq!(new.since_unix_ns, since, "{before:?}");
        }
    }

    #[test]
    fn a_view_is_the_same_until_a_reader_sees_a_difference() {
        let view = || PodView {
            pod_ref: PodRef { uid: PodUid::parse("u").unwrap(), namespace: "ns".into(), name: "p".into() },
            source: SourceKind::File,
            pod: Arc::default(),
            status: None,
            deletion: None,
            worker: "sync",
            is_removed: false,
            waiting: Some(wait("CrashLoop", "a", 1)),
            decision: Arc::default(),
            created_unix_ns: 1,
            resource_version: String::new(),
            mirror_uid: String::new(),
            version: 1,
        };
        type Change = fn(&mut PodView);
        let changes: [(&str, Change, bool); 8] = [
            ("nothing", |_| {}, true),
            ("version", |v| v.version = 2, true),
            ("end of the wait within the jitter", |v| v.waiting = Some(wait("CrashLoop", "a", 1_000)), true),
            ("end of the wait", |v| v.waiting = Some(wait("CrashLoop", "a", 200_000_000)), false),
            ("no wait", |v| v.waiting = None, false),
            ("status", |v| v.status = Some(Arc::default()), false),
            ("phase", |v| v.worker = "finished", false),
            ("mirror", |v| v.mirror_uid = "m".to_owned(), false),
        ];
        for (name, change, same) in changes {
            let mut new = view();
            change(&mut new);
            assert_eq!(is_same_view(&view(), &new), same, "{name}");
        }
    }
}
