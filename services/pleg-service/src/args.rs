//! Command line.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_config::ConfigArgs;
use quintlet_kit::args::{CommonArgs, SubscriberArgs};

use crate::Periods;

/// Caches the runtime state of all pods and reports its changes.
#[derive(Debug, clap::Parser)]
#[command(name = "pleg-service", version)]
pub(crate) struct Args {
    /// Arguments of all services.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Source of the configuration.
    #[command(flatten)]
    pub config: ConfigArgs,

    /// Users that may subscribe.
    #[command(flatten)]
    pub subscribers: SubscriberArgs,

    /// Inspect nothing: serve what the pleg-service at this socket has, so that many watchers cost it one
    /// stream. A follower needs a --run-dir of its own, serves at DIR/pleg/pleg.sock and has no socket for
    /// subscribers.
    #[arg(long, value_name = "SOCKET")]
    pub follow: Option<PathBuf>,

    /// Pause between full lists of the runtime without live hints, with a unit: 1s.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = positive)]
    pub relist_period: Duration,

    /// Pause between full lists while the runtime's hints are live, with a unit: 30s.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = positive)]
    pub relist_period_live: Duration,

    /// Age of the last successful list that makes the node not ready, with a unit: 3m.
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = positive)]
    pub relist_threshold: Duration,

    /// Limit of a list and of an inspection, with a unit: 2m.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = positive)]
    pub runtime_request_timeout: Duration,
}

impl Args {
    /// Returns the effective periods.
    #[must_use]
    pub(crate) fn periods(&self) -> Periods {
        Periods {
            relist: self.relist_period,
            relist_live: self.relist_period_live,
            threshold: self.relist_threshold,
            call: self.runtime_request_timeout,
            ..Periods::default()
        }
    }
}

fn positive(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(d) if d.is_zero() => Err("must be more than zero".to_owned()),
        Ok(d) => Ok(d),
        Err(e) => Err(format!("{e}; a duration needs a unit, e.g. 5s")),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};
    use quintlet_config::table::Service;

    use super::*;

    #[test]
    fn periods_come_from_the_file() {
        assert_eq!(quintlet_testkit::command_line::differences(&Args::command(), Service::Pleg), [""; 0]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n\
                    relistPeriod: 2s\nrelistPeriodLive: 1m30s\nrelistThreshold: 5m\n\
                    ---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nruntimeRequestTimeout: 7m\n";
        std::fs::write(&path, file).unwrap();
        let line = ["pleg-service", "--config", path.to_str().unwrap(), "--relist-threshold", "6m"];
        let args = quintlet_config::read::<Args>(Service::Pleg, line.map(Into::into).into()).unwrap().args;
        let periods = args.periods();
        let seconds =
            [periods.relist, periods.relist_live, periods.threshold, periods.call].map(|p| p.as_secs());
        assert_eq!(seconds, [2, 90, 360, 420], "a flag wins");
    }

    #[test]
    fn an_address_for_subscribers_needs_no_certificate_here() {
        let line = ["pleg-service", "--subscriber-listen=[::]:10270", "--subscriber-relay-uid=7"];
        let read = quintlet_config::read::<Args>(Service::Pleg, line.map(Into::into).into());
        assert_eq!(read.unwrap().args.subscribers.users(), [7]);
    }

    #[test]
    fn durations_need_a_unit_and_are_more_than_zero() {
        assert!(Args::try_parse_from(["pleg-service", "--relist-period", "5"]).is_err());
        assert!(Args::try_parse_from(["pleg-service", "--relist-period", "0s"]).is_err());
        let args =
            Args::try_parse_from(["pleg-service", "--relist-period-live", "10m"]).expect("a unit is there");
        assert_eq!(args.periods().relist_live, Duration::from_secs(600));
        assert_eq!(args.periods().relist, Duration::from_secs(1));
    }
}
