//! What is told when a service comes and goes.

use tokio::time::Instant;

use super::Line;
use super::lines::service_line;
use crate::text::{clean, took};

/// Which run of a service answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    /// What tells it from another: the process id, or the epoch.
    pub(super) id: u64,
    /// That in words.
    pub(super) name: String,
}

/// One service, as far as being there goes.
pub(super) struct Link {
    service: String,
    /// Since when it is away; None while it is not.
    away: Option<Instant>,
    run: Option<Run>,
    answered: bool,
}

impl Link {
    pub(super) fn new(service: &str) -> Self {
        Self { service: service.to_owned(), away: None, run: None, answered: false }
    }

    /// It does not answer. Told once.
    pub(super) fn lost(&mut self, why: &str) -> Option<Line> {
        if self.away.is_some() {
            return None;
        }
        self.away = Some(Instant::now());
        let verb = if self.answered { "is away" } else { "does not answer yet" };
        Some(service_line(&self.service, format!("{verb}: {}", clean(why))))
    }

    /// It answers, as `run`; `more` is what else there is to say.
    pub(super) fn back(&mut self, run: Option<Run>, more: &str) -> Option<Line> {
        let away = self.away.take();
        let first = !std::mem::replace(&mut self.answered, true);
        let before = std::mem::replace(&mut self.run, run);
        let after = took(i64::try_from(away?.elapsed().as_nanos()).unwrap_or(i64::MAX));
        let more = if more.is_empty() { String::new() } else { format!(", {more}") };
        let text = match (&before, &self.run) {
            _ if first => format!("answers{more}"),
            (Some(before), Some(now)) if before != now => {
                format!("restarted: {}, back after {after}{more}", now.name)
            }
            _ => format!("is back after {after}{more}"),
        };
        Some(service_line(&self.service, text))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn run(id: u64) -> Option<Run> {
        Some(Run { id, name: format!("epoch {id}") })
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_goes_and_comes_is_told_once_each() {
        let mut link = Link::new("pleg-service");
        assert!(link.back(run(7), "").is_none());
        assert_eq!(link.lost("refused").unwrap().text, "is away: refused");
        assert!(link.lost("refused").is_none());
        tokio::time::advance(Duration::from_millis(1500)).await;
        let told = link.back(run(8), "0 pods changed meanwhile").unwrap().text;
        assert_eq!(told, "restarted: epoch 8, back after 1.5s, 0 pods changed meanwhile");
        assert!(link.back(run(8), "").is_none());
        assert!(link.lost("cut").is_some());
        assert_eq!(link.back(run(8), "").unwrap().text, "is back after 0µs", "the same run is no restart");
        let mut never = Link::new("pod-sync");
        assert_eq!(never.lost("no file").unwrap().text, "does not answer yet: no file");
        assert_eq!(never.back(run(1), "").unwrap().text, "answers");
    }
}
