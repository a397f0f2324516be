//! `quintctl version`: the versions of this program and of the running services.

use quintctl_text::{NOTHING, age, clean, or_nothing, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{BuildReply, BuildRequest};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

const OWN: &str = env!("CARGO_PKG_VERSION");

/// The version of this program or of a service.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    pub(crate) service: String,
    /// Version of the service; `None` if the service does not respond.
    pub(crate) version: Option<String>,
    pub(crate) commit: Option<String>,
    /// Process ID; `None` for this program and for a service that does not respond.
    pub(crate) pid: Option<u32>,
    pub(crate) uptime_seconds: Option<f64>,
    /// The service was built from another version or commit than this program.
    pub(crate) skew: bool,
    /// Reason why the service does not respond.
    pub(crate) error: Option<String>,
}

pub(crate) async fn run(paths: &Paths, format: Format) -> Result<(), Error> {
    let rows = fetch(paths).await;
    print(format.render(&rows, |_| render(&rows))?)
}

/// Returns the row of this program, then a row per service.
pub(crate) async fn fetch(paths: &Paths) -> Vec<Row> {
    let commit = quintlet_kit::build::commit();
    let own = Row {
        service: "quintctl".to_owned(),
        version: Some(OWN.to_owned()),
        commit: Some(commit.to_owned()),
        pid: None,
        uptime_seconds: None,
        skew: false,
        error: None,
    };
    let peers = Peer::all(paths);
    let answers = futures::future::join_all(peers.iter().map(build)).await;
    let rows = peers.into_iter().zip(answers).map(|(peer, answer)| row(peer.service, answer, OWN, commit));
    std::iter::once(own).chain(rows).collect()
}

async fn build(peer: &Peer) -> Result<BuildReply, Error> {
    let mut client = DebugClient::new(peer.channel().await?);
    peer.call(client.build(BuildRequest {})).await
}

fn row(service: String, answer: Result<BuildReply, Error>, own: &str, own_commit: &str) -> Row {
    match answer {
        Ok(b) => Row {
            service,
            skew: b.version != own || b.commit != own_commit,
            version: Some(b.version),
            commit: Some(b.commit),
            pid: Some(b.pid),
            uptime_seconds: Some(b.uptime_seconds),
            error: None,
        },
        Err(error) => Row {
            service,
            version: None,
            commit: None,
            pid: None,
            uptime_seconds: None,
            skew: false,
            error: Some(quintlet_kit::error_chain(&error)),
        },
    }
}

#[must_use]
pub(crate) fn render(rows: &[Row]) -> String {
    let dash = || NOTHING.to_owned();
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            let note = match &r.error {
                Some(error) => clean(error),
                None if r.skew => "another build than this quintctl".to_owned(),
                None => String::new(),
            };
            vec![
                clean(&r.service),
                r.version.as_deref().map_or_else(dash, or_nothing),
                r.commit.as_deref().map_or_else(dash, |c| or_nothing(c.get(..12).unwrap_or(c))),
                r.pid.map_or_else(dash, |p| p.to_string()),
                r.uptime_seconds.map_or_else(dash, |s| age(whole_ns(s))),
                note,
            ]
        })
        .collect();
    table(&["SERVICE", "VERSION", "COMMIT", "PID", "UP", "NOTE"], &cells)
}

fn whole_ns(seconds: f64) -> i64 {
    std::time::Duration::try_from_secs_f64(seconds)
        .ok()
        .and_then(|d| i64::try_from(d.as_nanos()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_says_that_a_service_is_of_another_build_or_why_it_does_not_answer() {
        let reply = |version: &str| {
            Ok(BuildReply {
                service: "x".into(),
                version: version.into(),
                commit: "0123456789abcdef".into(),
                pid: 12,
                uptime_seconds: 185.5,
                ..BuildReply::default()
            })
        };
        let rows = [
            row("same".into(), reply("0.1.0"), "0.1.0", "0123456789abcdef"),
            row("older".into(), reply("0.0.9"), "0.1.0", "0123456789abcdef"),
            row("away".into(), Err(Error::NotFound("gone".into())), "0.1.0", "0123456789abcdef"),
        ];
        assert_eq!(
            render(&rows),
            "\
SERVICE  VERSION  COMMIT        PID  UP    NOTE
same     0.1.0    0123456789ab  12   3m5s
older    0.0.9    0123456789ab  12   3m5s  another build than this quintctl
away     –        –             –    –     gone
"
        );
    }
}
