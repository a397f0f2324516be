//! The health of the storage behind CSI drivers, for `CSINode.status.storageHealth`
//! (`pkg/kubelet/volumehealth`).

use std::collections::BTreeSet;

use k8s_openapi::api::storage::v1::StorageHealthCondition;
use quintlet_model::text;

use crate::volume_health::{LONGEST_MESSAGE, LONGEST_REASON, MOST_CONDITIONS};

/// The kind of a problem of storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageProblem {
    /// The storage cannot be reached from this node.
    Unreachable,
    /// The storage works worse than it should.
    Degraded,
}

impl StorageProblem {
    fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "StorageUnreachable",
            Self::Degraded => "StorageDegraded",
        }
    }
}

/// A problem of a driver's storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageReport {
    /// Kind of the problem, which becomes the type of the condition.
    pub problem: StorageProblem,
    /// The driver's code, in CamelCase.
    pub reason: String,
    /// The driver's description, for people.
    pub message: String,
    /// Access mode of the affected volumes, as in the API; `None` for all modes.
    pub access_mode: Option<&'static str>,
    /// Volume mode of the affected volumes, as in the API; `None` for both modes.
    pub volume_mode: Option<&'static str>,
}

/// Returns the fields that identify a condition. Another message is no change.
fn identity(condition: &StorageHealthCondition) -> [&str; 4] {
    let StorageHealthCondition { status, reason, access_mode, volume_mode, .. } = condition;
    let modes = [access_mode, volume_mode].map(|mode| mode.as_deref().unwrap_or_default());
    [status, reason, modes[0], modes[1]]
}

/// Returns the conditions that the API server takes, without times: one per status, reason and modes, at most
/// 16, with texts that are cut. A missing reason is that of the status.
#[must_use]
pub fn conditions(reports: impl IntoIterator<Item = StorageReport>) -> Vec<StorageHealthCondition> {
    let mut found: Vec<StorageHealthCondition> = Vec::new();
    for report in reports {
        let status = report.problem.name().to_owned();
        let reason = text::shortened(report.reason, LONGEST_REASON);
        let message = text::shortened(report.message, LONGEST_MESSAGE);
        let condition = StorageHealthCondition {
            reason: if reason.is_empty() { status.clone() } else { reason },
            status,
            message: Some(message).filter(|message| !message.is_empty()),
            access_mode: report.access_mode.map(str::to_owned),
            volume_mode: report.volume_mode.map(str::to_owned),
            last_transition_time: None,
        };
        if found.len() < MOST_CONDITIONS && found.iter().all(|other| identity(other) != identity(&condition))
        {
            found.push(condition);
        }
    }
    found
}

/// Returns whether two answers have the same statuses, reasons and modes.
#[must_use]
pub fn are_same(a: &[StorageHealthCondition], b: &[StorageHealthCondition]) -> bool {
    fn identities(list: &[StorageHealthCondition]) -> BTreeSet<[&str; 4]> {
        list.iter().map(identity).collect()
    }
    identities(a) == identities(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    use StorageProblem::{Degraded, Unreachable};

    type Report<'a> = (StorageProblem, &'a str, &'a str, Option<&'static str>, Option<&'static str>);

    fn of(reports: &[Report<'_>]) -> Vec<StorageHealthCondition> {
        let report = |&(problem, reason, message, access_mode, volume_mode): &Report<'_>| StorageReport {
            problem,
            reason: reason.to_owned(),
            message: message.to_owned(),
            access_mode,
            volume_mode,
        };
        conditions(reports.iter().map(report))
    }

    fn brief(conditions: &[StorageHealthCondition]) -> Vec<String> {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let brief = |c: &StorageHealthCondition| {
            let [message, access, volume] = [&c.message, &c.access_mode, &c.volume_mode].map(or_dash);
            format!("{}/{} {access} {volume}: {message}", c.status, c.reason)
        };
        conditions.iter().map(brief).collect()
    }

    #[test]
    fn the_api_server_takes_the_conditions_of_every_answer_about_storage() {
        let many = Some("ReadWriteMany");
        let table: [(&[Report<'_>], &[&str]); 4] = [
            (&[], &[]),
            (
                &[(Unreachable, "Gone", "x", None, None), (Degraded, "Slow", "", many, Some("Block"))],
                &["StorageUnreachable/Gone - -: x", "StorageDegraded/Slow ReadWriteMany Block: -"],
            ),
            (
                &[(Degraded, "", "1", None, None), (Degraded, "StorageDegraded", "2", None, None)],
                &["StorageDegraded/StorageDegraded - -: 1"],
            ),
            // CSI allows one condition per status, reason and capability.
            (
                &[
                    (Degraded, "Slow", "1", None, None),
                    (Degraded, "Slow", "2", many, None),
                    (Degraded, "Slow", "3", many, None),
                    (Degraded, "Slow", "4", many, Some("Block")),
                ],
                &[
                    "StorageDegraded/Slow - -: 1",
                    "StorageDegraded/Slow ReadWriteMany -: 2",
                    "StorageDegraded/Slow ReadWriteMany Block: 4",
                ],
            ),
        ];
        for (reports, expected) in table {
            assert_eq!(brief(&of(reports)), expected, "{reports:?}");
        }
        let numbers: Vec<String> = (0..40).map(|number| format!("R{number}")).collect();
        let reports: Vec<Report<'_>> =
            numbers.iter().map(|reason| (Degraded, reason.as_str(), "", None, None)).collect();
        let all = of(&reports);
        assert_eq!((all.len(), all[15].reason.as_str()), (16, "R15"));
        // Reasons that are the same once they are cut, and a message that is cut on a character.
        let long = |end: &str| format!("{}{end}", "r".repeat(256));
        let (one, two) = (long("1"), long("2"));
        let message = "é".repeat(600);
        let cut = of(&[(Degraded, &one, &message, None, None), (Degraded, &two, &message, None, None)]);
        let lengths =
            |c: &StorageHealthCondition| (c.reason.len(), c.message.as_ref().map_or(0, String::len));
        assert_eq!(cut.iter().map(lengths).collect::<Vec<_>>(), [(256, 1024)]);
    }

    #[test]
    fn another_message_or_order_is_the_same_answer_and_another_mode_is_not() {
        let answer = of(&[(Degraded, "Slow", "1", None, None), (Unreachable, "Gone", "2", None, None)]);
        let turned = of(&[(Unreachable, "Gone", "3", None, None), (Degraded, "Slow", "4", None, None)]);
        assert!(are_same(&answer, &turned));
        for other in [
            of(&[]),
            of(&[(Degraded, "Slow", "1", None, None)]),
            of(&[(Degraded, "Slow", "1", None, Some("Block")), (Unreachable, "Gone", "2", None, None)]),
            of(&[(Degraded, "Full", "1", None, None), (Unreachable, "Gone", "2", None, None)]),
        ] {
            assert!(!are_same(&answer, &other), "{other:?}");
        }
    }
}
