use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use pod_sync_node_decisions::shutdown::PriorityGracePeriod;
use tokio::time::Instant;

use super::*;

// Pods that take so many seconds to stop and to be unmounted.

struct Fake {
    takes: BTreeMap<&'static str, (u64, u64)>,
    began: Instant,
    ended: Mutex<Vec<(&'static str, u64, u64)>>,
}

#[async_trait]
impl Pods for Fake {
    type Pod = &'static str;

    fn active(&self) -> Vec<(Option<i32>, &'static str)> {
        Vec::new()
    }

    async fn kill(&self, pod: &&'static str, group_seconds: u64) {
        self.ended.lock().push((*pod, self.began.elapsed().as_secs(), group_seconds));
        tokio::time::sleep(Duration::from_secs(self.takes[pod].0)).await;
    }

    async fn wait_unmounted(&self, pod: &&'static str) {
        tokio::time::sleep(Duration::from_secs(self.takes[pod].1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn groups_are_terminated_in_order_each_within_its_time() {
    let takes = [("quick", (1, 1)), ("mounted", (1, 4)), ("hangs", (1000, 0)), ("critical", (3, 0))];
    let pods = Fake { takes: takes.into(), began: Instant::now(), ended: Mutex::default() };
    let share = |priority, seconds| PriorityGracePeriod { priority, seconds };
    let plan = ShutdownPlan::from_priorities(vec![share(0, 20), share(100, 10), share(2_000_000_000, 7)]);
    let all = [(Some(2_000_000_000), "critical"), (Some(100), "hangs"), (None, "quick"), (None, "mounted")];
    kill_groups(&pods, plan.groups(all)).await;
    assert_eq!(
        *pods.ended.lock(),
        [("quick", 0, 20), ("mounted", 0, 20), ("hangs", 5, 10), ("critical", 15, 7)],
        "a group begins when the one before is unmounted, or its time is over"
    );
    assert_eq!(pods.began.elapsed().as_secs(), 18, "remaining time is not awaited");
}

struct Reloads {
    // What logind answers, one after another; the last from then on.
    answers: Mutex<Vec<u64>>,
    raised: Mutex<Vec<Duration>>,
}

#[async_trait]
impl Session for Reloads {
    async fn max_delay(&self) -> Result<Duration, LoginError> {
        let mut answers = self.answers.lock();
        let now = answers[0];
        if answers.len() > 1 {
            answers.remove(0);
        }
        Ok(Duration::from_secs(now))
    }

    async fn raise_max_delay(&self, delay: Duration) -> Result<(), LoginError> {
        self.raised.lock().push(delay);
        Ok(())
    }

    async fn inhibit(&self) -> Result<OwnedFd, LoginError> {
        Ok(std::fs::File::open("/dev/null").unwrap().into())
    }

    async fn is_preparing(&self) -> Result<bool, LoginError> {
        Ok(false)
    }

    async fn prepare_for_shutdown(&mut self) -> Option<bool> {
        None
    }
}

#[tokio::test(start_paused = true)]
async fn the_delay_of_logind_is_raised_and_verified() {
    for (answers, raised, ok, millis) in [
        (vec![30], 0, true, 0),
        (vec![60], 0, true, 0),
        (vec![5, 30], 1, true, 0),
        (vec![5, 5, 5, 30], 1, true, 300),
        (vec![5], 1, false, 3100),
    ] {
        let what = format!("{answers:?}");
        let session = Reloads { answers: Mutex::new(answers), raised: Mutex::default() };
        let began = Instant::now();
        let allowed = allow_delay(&session, Duration::from_secs(30)).await;
        assert_eq!(allowed.is_ok(), ok, "{what}");
        assert_eq!(session.raised.lock().len(), raised, "{what}");
        assert_eq!(began.elapsed().as_millis(), millis, "{what}");
    }
}
