//! `quintctl log-level`: shows or replaces the log filter of a running service.

use quintctl_text::{clean, table};
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_proto::debug::v1::control_client::ControlClient;
use quintlet_proto::debug::v1::{SetLogFilterReply, SetLogFilterRequest};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::health::ServiceArg;
use crate::out::{Format, print};

/// Show or change the log filter of a running service.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LogLevelArgs {
    /// Service, all of whose instances here are meant
    pub(crate) service: ServiceArg,
    /// Log level or tracing filter, such as `debug` or `info,pod_sync=debug`. Without it, the filter is shown
    #[arg(value_name = "FILTER")]
    pub(crate) filter: Option<String>,
    /// Time after which the filter of before applies again. Without it, the filter stays until the service
    /// ends
    #[arg(long = "for", value_name = "SECONDS", requires = "filter", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) seconds: Option<u32>,
}

/// The log filter of a service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    service: String,
    filter: String,
    previous: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<u32>,
}

/// Asks each instance of the service, and prints the filters.
///
/// # Errors
/// The filter is invalid, the caller is neither root nor the user of the service, or an instance does not
/// answer.
pub(crate) async fn run(args: LogLevelArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peers = match args.service {
        // The other sockets of cri-proxy do not have the method.
        ServiceArg::CriProxy => vec![Peer::new("cri-proxy", paths.cri(CriSocket::Admin))],
        service => service.peers(paths),
    };
    let mut rows = Vec::new();
    for peer in peers {
        let request = SetLogFilterRequest {
            filter: args.filter.clone().unwrap_or_default(),
            seconds: args.seconds.unwrap_or_default(),
        };
        let mut client = ControlClient::new(peer.channel().await?);
        let SetLogFilterReply { filter, previous } = peer.call(client.set_log_filter(request)).await?;
        rows.push(Row { service: peer.service, filter, previous, seconds: args.seconds });
    }
    print(format.render(&rows, |_| render(&rows))?)
}

fn render(rows: &[Row]) -> String {
    let cells = rows.iter().map(|row| {
        let note = match (row.filter == row.previous, row.seconds) {
            (_, Some(seconds)) => format!("for {seconds} s, before: {}", clean(&row.previous)),
            (false, None) => format!("before: {}", clean(&row.previous)),
            (true, None) => String::new(),
        };
        vec![row.service.clone(), clean(&row.filter), note]
    });
    table(&["SERVICE", "LOG FILTER", ""], &cells.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_names_the_filter_of_before_and_its_time() {
        let row = |filter: &str, seconds| Row {
            service: "pod-sync".to_owned(),
            filter: filter.to_owned(),
            previous: "info".to_owned(),
            seconds,
        };
        let lines = render(&[row("info", None), row("debug", None), row("debug", Some(60))]);
        let lines: Vec<&str> = lines.lines().map(str::trim_end).collect();
        assert_eq!(
            lines,
            [
                "SERVICE   LOG FILTER",
                "pod-sync  info",
                "pod-sync  debug       before: info",
                "pod-sync  debug       for 60 s, before: info",
            ]
        );
    }
}
