//! Groups pods for a node shutdown and computes their grace periods
//! (`pkg/kubelet/nodeshutdown: groupByPriority`).

use std::time::Duration;

/// Lowest priority of critical pods (`pkg/apis/scheduling: SystemCriticalPriority`).
const CRITICAL: i32 = 2_000_000_000;
/// Priority of a pod without one.
const DEFAULT: i32 = 0;

/// Grace period of pods from a priority on (`shutdownGracePeriodByPodPriority`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PriorityGracePeriod {
    /// Lowest priority.
    pub priority: i32,
    /// Grace period, in seconds.
    pub seconds: u64,
}

/// Grace periods by priority. An empty plan does not delay a shutdown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownPlan {
    // Sorted by priority, lowest first.
    shares: Vec<PriorityGracePeriod>,
}

/// Pods that are terminated together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShutdownGroup<T> {
    /// Grace period of the whole group, in seconds.
    pub seconds: u64,
    /// The pods, each of which has at most this grace period.
    pub pods: Vec<T>,
}

impl ShutdownPlan {
    /// Builds a plan from `shutdownGracePeriod` and `shutdownGracePeriodCriticalPods`, which is a part of it.
    #[must_use]
    pub fn from_total(total: Duration, critical: Duration) -> Self {
        let others = total.saturating_sub(critical);
        let share = |priority, period: Duration| PriorityGracePeriod { priority, seconds: period.as_secs() };
        Self::from_priorities(vec![share(DEFAULT, others), share(CRITICAL, critical)])
    }

    /// Builds a plan from `shutdownGracePeriodByPodPriority`.
    #[must_use]
    pub fn from_priorities(mut shares: Vec<PriorityGracePeriod>) -> Self {
        shares.sort_by_key(|s| s.priority);
        if shares.iter().all(|s| s.seconds == 0) {
            shares.clear();
        }
        Self { shares }
    }

    /// Returns whether a shutdown is not delayed.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.shares.is_empty()
    }

    /// Returns the grace period of all groups together.
    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_secs(self.shares.iter().fold(0, |sum, s| sum.saturating_add(s.seconds)))
    }

    /// Groups pods in the order in which they are terminated. Pods below every priority are in the lowest
    /// group. Empty groups are omitted.
    #[must_use]
    pub fn groups<T>(&self, pods: impl IntoIterator<Item = (Option<i32>, T)>) -> Vec<ShutdownGroup<T>> {
        let mut groups: Vec<ShutdownGroup<T>> =
            self.shares.iter().map(|s| ShutdownGroup { seconds: s.seconds, pods: Vec::new() }).collect();
        for (priority, pod) in pods {
            let priority = priority.unwrap_or(DEFAULT);
            let at = self.shares.iter().rposition(|s| s.priority <= priority).unwrap_or(0);
            if let Some(group) = groups.get_mut(at) {
                group.pods.push(pod);
            }
        }
        groups.retain(|g| !g.pods.is_empty());
        groups
    }
}

/// Returns the grace period of a pod in a group, in seconds: its own if that is shorter.
#[must_use]
pub fn pod_grace(own: Option<i64>, group_seconds: u64) -> i64 {
    let most = i64::try_from(group_seconds).unwrap_or(i64::MAX);
    own.map_or(most, |own| own.min(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(priority: i32, seconds: u64) -> PriorityGracePeriod {
        PriorityGracePeriod { priority, seconds }
    }

    fn total(total: u64, critical: u64) -> ShutdownPlan {
        ShutdownPlan::from_total(Duration::from_secs(total), Duration::from_secs(critical))
    }

    #[test]
    fn pods_are_terminated_by_priority_each_with_its_grace_period() {
        let pods: [(Option<i32>, &str); 6] = [
            (Some(i32::MAX), "highest"),
            (Some(CRITICAL), "critical"),
            (Some(1000), "high"),
            (None, "plain"),
            (Some(0), "zero"),
            (Some(-5), "low"),
        ];
        let graded = ShutdownPlan::from_priorities(vec![
            share(1000, 20),
            share(-5, 5),
            share(100, 30),
            share(CRITICAL, 1),
        ]);
        let above = ShutdownPlan::from_priorities(vec![share(2000, 7), share(3000, 8)]);
        let (critical, others) = (vec!["highest", "critical"], vec!["high", "plain", "zero", "low"]);
        for (plan, want) in [
            (total(30, 10), vec![(20, others.clone()), (10, critical.clone())]),
            (total(30, 0), vec![(30, others.clone()), (0, critical.clone())]),
            (total(30, 30), vec![(0, others), (30, critical.clone())]),
            (graded, vec![(5, vec!["plain", "zero", "low"]), (20, vec!["high"]), (1, critical.clone())]),
            (above, vec![(7, vec!["high", "plain", "zero", "low"]), (8, critical)]),
            (total(0, 0), vec![]),
        ] {
            let groups = plan.groups(pods).into_iter().map(|g| (g.seconds, g.pods)).collect::<Vec<_>>();
            assert_eq!(groups, want, "{plan:?}");
        }
        assert_eq!(total(30, 10).total(), Duration::from_secs(30));
        assert!(total(0, 0).is_disabled() && ShutdownPlan::from_priorities(vec![share(1, 0)]).is_disabled());
        assert!(!total(1, 1).is_disabled());
    }

    #[test]
    fn a_pod_has_no_more_grace_than_its_group() {
        for (own, group, want) in [(Some(30), 10, 10), (Some(5), 10, 5), (None, 10, 10), (Some(0), 10, 0)] {
            assert_eq!(pod_grace(own, group), want, "{own:?} {group}");
        }
    }
}
