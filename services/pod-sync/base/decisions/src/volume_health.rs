//! The health of volumes in the status of a pod, as the drivers report it (`pkg/kubelet/volumehealth`).

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PodStatus, PodVolumeHealth, VolumeHealthCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use quintlet_model::text;

/// Most conditions of a volume or a driver's storage that the API server takes.
pub(crate) const MOST_CONDITIONS: usize = 16;
/// Longest reason that the API server takes, in bytes.
pub(crate) const LONGEST_REASON: usize = 256;
/// Longest message that the API server takes, in bytes.
pub(crate) const LONGEST_MESSAGE: usize = 1024;

/// The kind of a problem of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeProblem {
    /// The volume cannot be accessed from this node.
    Inaccessible,
    /// Data is lost, certainly or probably.
    DataLoss,
    /// The volume works worse than it should.
    Degraded,
}

impl VolumeProblem {
    fn name(self) -> &'static str {
        match self {
            Self::Inaccessible => "Inaccessible",
            Self::DataLoss => "DataLoss",
            Self::Degraded => "Degraded",
        }
    }
}

/// The volumes of a pod whose health is asked for, by the name in the pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodVolumeAnswers {
    /// The last answer of each volume's driver; `None` without one since the start of the process.
    pub volumes: BTreeMap<String, Option<Vec<VolumeHealthCondition>>>,
    /// The pod has no other volumes. Otherwise its volumes are not all known, as after a restart.
    pub are_all: bool,
}

/// Returns the conditions of an answer that the API server takes: one per status and reason, at most 16, with
/// texts that are cut. A missing reason is that of the status. The API server refuses a status with other
/// conditions, and the pod could not be deleted.
#[must_use]
pub fn conditions(
    entries: impl IntoIterator<Item = (VolumeProblem, String, String)>,
) -> Vec<VolumeHealthCondition> {
    let mut seen = BTreeSet::new();
    let condition = |(problem, reason, message): (VolumeProblem, String, String)| {
        let status = problem.name();
        let reason =
            if reason.is_empty() { status.to_owned() } else { text::shortened(reason, LONGEST_REASON) };
        let message = Some(text::shortened(message, LONGEST_MESSAGE)).filter(|message| !message.is_empty());
        seen.insert((status, reason.clone())).then(|| VolumeHealthCondition {
            status: status.to_owned(),
            reason,
            message,
        })
    };
    entries.into_iter().filter_map(condition).take(MOST_CONDITIONS).collect()
}

/// Returns whether two answers have the same statuses and reasons. As in the kubelet, another message is no
/// change.
#[must_use]
pub fn are_same(a: &[VolumeHealthCondition], b: &[VolumeHealthCondition]) -> bool {
    fn keys(list: &[VolumeHealthCondition]) -> BTreeSet<(&str, &str)> {
        list.iter().map(|condition| (condition.status.as_str(), condition.reason.as_str())).collect()
    }
    keys(a) == keys(b)
}

/// Sets the health of the volumes, sorted by their names. A volume without an answer keeps that of the old
/// status, as does one that is not known yet. A healthy volume has no entry.
pub fn add_volume_health(
    status: &mut PodStatus,
    old: Option<&PodStatus>,
    answers: &PodVolumeAnswers,
    now: Timestamp,
) {
    let old: BTreeMap<&str, &PodVolumeHealth> = old
        .into_iter()
        .flat_map(|old| old.volume_health.iter().flatten())
        .map(|health| (health.name.as_str(), health))
        .collect();
    let mut names: BTreeSet<&str> = answers.volumes.keys().map(String::as_str).collect();
    if !answers.are_all {
        names.extend(old.keys());
    }
    let health = |name: &str| {
        let before = old.get(name).copied();
        let Some(Some(conditions)) = answers.volumes.get(name) else { return before.cloned() };
        let known = before.and_then(|before| before.health_conditions.as_deref()).unwrap_or_default();
        if are_same(known, conditions) {
            return before.cloned().filter(|_| !conditions.is_empty());
        }
        (!conditions.is_empty()).then(|| PodVolumeHealth {
            name: name.to_owned(),
            health_conditions: Some(conditions.clone()),
            last_transition_time: Timestamp::from_second(now.as_second()).ok().map(Time),
        })
    };
    let list: Vec<PodVolumeHealth> = names.into_iter().filter_map(health).collect();
    status.volume_health = Some(list).filter(|list| !list.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    use VolumeProblem::{DataLoss, Degraded, Inaccessible};

    /// Problem, reason and message.
    type Entry<'a> = (VolumeProblem, &'a str, &'a str);

    fn answer(entries: &[Entry<'_>]) -> Vec<VolumeHealthCondition> {
        let owned =
            |(problem, reason, message): &Entry<'_>| (*problem, (*reason).to_owned(), (*message).to_owned());
        conditions(entries.iter().map(owned))
    }

    fn brief(conditions: &[VolumeHealthCondition]) -> Vec<String> {
        let brief = |c: &VolumeHealthCondition| {
            format!("{}/{}: {}", c.status, c.reason, c.message.as_deref().unwrap_or("-"))
        };
        conditions.iter().map(brief).collect()
    }

    fn shown(status: &PodStatus) -> String {
        let volume = |health: &PodVolumeHealth| {
            let conditions = brief(health.health_conditions.as_deref().unwrap_or_default()).join(", ");
            let since = health.last_transition_time.as_ref().unwrap().0.as_second();
            format!("{} since {since}: {conditions}", health.name)
        };
        status.volume_health.iter().flatten().map(volume).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn the_api_server_takes_the_conditions_of_every_answer() {
        let table: [(&[Entry<'_>], &[&str]); 4] = [
            (&[], &[]),
            (
                &[(Inaccessible, "Gone", "x"), (DataLoss, "Gone", ""), (Degraded, "Slow", "y")],
                &["Inaccessible/Gone: x", "DataLoss/Gone: -", "Degraded/Slow: y"],
            ),
            (
                &[(Degraded, "Slow", "1"), (Degraded, "Slow", "2"), (Degraded, "Full", "3")],
                &["Degraded/Slow: 1", "Degraded/Full: 3"],
            ),
            (
                &[(Degraded, "", "1"), (Degraded, "Degraded", "2"), (DataLoss, "", "3")],
                &["Degraded/Degraded: 1", "DataLoss/DataLoss: 3"],
            ),
        ];
        for (entries, expected) in table {
            assert_eq!(brief(&answer(entries)), expected, "{entries:?}");
        }
        let many = (0..40).map(|number| (Degraded, format!("R{number}"), String::new()));
        let many = conditions(many);
        assert_eq!((many.len(), many[15].reason.as_str()), (16, "R15"));
        // Reasons that are the same once they are cut, and a message that is cut on a character.
        let long = |end: &str| (Degraded, format!("{}{end}", "r".repeat(256)), "é".repeat(600));
        let long = conditions([long("1"), long("2")]);
        let lengths = |c: &VolumeHealthCondition| (c.reason.len(), c.message.as_ref().map_or(0, String::len));
        assert_eq!(long.iter().map(lengths).collect::<Vec<_>>(), [(256, 1024)]);
        let odd = conditions([(Degraded, "R".to_owned(), format!("a{}", "é".repeat(600)))]);
        assert_eq!(odd[0].message.as_ref().map(String::len), Some(1023));
    }

    #[test]
    fn a_status_has_the_last_answers_and_keeps_what_is_not_known_yet() {
        let slow = Some(answer(&[(Degraded, "Slow", "1")]));
        let slower = Some(answer(&[(Degraded, "Slow", "2")]));
        let both = Some(answer(&[(Degraded, "Slow", "3"), (Inaccessible, "Gone", "4")]));
        let turned = Some(answer(&[(Inaccessible, "Gone", "5"), (Degraded, "Slow", "6")]));
        let well = Some(Vec::new());
        let unknown: Option<Vec<VolumeHealthCondition>> = None;
        // Answers by volume, whether these are all volumes, and the status after that of the row before, at
        // the time of the row.
        let table = [
            (vec![("b", &unknown), ("a", &unknown)], true, ""),
            (vec![("b", &slow), ("a", &well)], true, "b since 1: Degraded/Slow: 1"),
            (
                vec![("b", &slower), ("a", &slow)],
                true,
                "a since 2: Degraded/Slow: 1; b since 1: Degraded/Slow: 1",
            ),
            // After a restart.
            (vec![], false, "a since 2: Degraded/Slow: 1; b since 1: Degraded/Slow: 1"),
            (
                vec![("b", &unknown), ("a", &both)],
                true,
                "a since 4: Degraded/Slow: 3, Inaccessible/Gone: 4; b since 1: Degraded/Slow: 1",
            ),
            (
                vec![("a", &turned)],
                false,
                "a since 4: Degraded/Slow: 3, Inaccessible/Gone: 4; b since 1: Degraded/Slow: 1",
            ),
            (vec![("a", &well)], false, "b since 1: Degraded/Slow: 1"),
            // The volume is not mounted any more.
            (vec![("a", &well)], true, ""),
        ];
        let mut old = None;
        for (second, (volumes, are_all, expected)) in table.into_iter().enumerate() {
            let volumes = volumes.into_iter().map(|(name, answer)| (name.to_owned(), answer.clone()));
            let answers = PodVolumeAnswers { volumes: volumes.collect(), are_all };
            let now = Timestamp::from_millisecond(i64::try_from(second).unwrap() * 1000 + 500).unwrap();
            let mut status = PodStatus::default();
            add_volume_health(&mut status, old.as_ref(), &answers, now);
            assert_eq!(shown(&status), expected, "row {second}");
            assert_eq!(status.volume_health.is_some(), !expected.is_empty());
            old = Some(status);
        }
    }
}
