//! `quintctl events`: the newest events of pods, from pod-sync's memory.

use quintctl_text::{age, clean, now_ns, or_nothing, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{EventView, GetPodRequest, ListEventsRequest};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::time;

/// Events of pods, oldest first.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EventsArgs {
    /// Only events of this pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: Option<String>,
    /// Number of newest events to show; 0 shows all
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) limit: u32,
}

pub(crate) async fn run(args: EventsArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    let uid = match args.pod {
        Some(pod) => peer.call(client.get_pod(GetPodRequest { pod })).await?.uid,
        None => String::new(),
    };
    let request = ListEventsRequest { uid, limit: args.limit };
    let events = peer.list(client.list_events(request)).await?.events;
    let data: Vec<EventData> = events.iter().map(EventData::from).collect();
    print(format.render(&data, |_| render(&events, now_ns()))?)
}

/// Formats the table with ages relative to `now`, nanoseconds since 1970.
#[must_use]
pub(crate) fn render(events: &[EventView], now: i64) -> String {
    if events.is_empty() {
        return "no events\n".to_owned();
    }
    let rows: Vec<Vec<String>> = events
        .iter()
        .map(|e| {
            let pod = e.pod.strip_prefix("default/").unwrap_or(&e.pod);
            let age = age(now - e.at_unix_ns);
            vec![
                if e.count > 1 { format!("{age} (x{})", e.count) } else { age },
                clean(&e.r#type),
                clean(&e.reason),
                or_nothing(pod),
                or_nothing(&e.field_path),
                clean(&e.message),
            ]
        })
        .collect();
    table(&["LAST SEEN", "TYPE", "REASON", "POD", "FIELD", "MESSAGE"], &rows)
}

/// An event in JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventData {
    at: Option<String>,
    pod: String,
    r#type: String,
    reason: String,
    message: String,
    field_path: String,
    count: u32,
}

impl From<&EventView> for EventData {
    fn from(e: &EventView) -> Self {
        Self {
            at: time(e.at_unix_ns),
            pod: e.pod.clone(),
            r#type: e.r#type.clone(),
            reason: e.reason.clone(),
            message: e.message.clone(),
            field_path: e.field_path.clone(),
            count: e.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_its_message_contains() {
        let event = EventView {
            at_unix_ns: 0,
            pod: "default/web".into(),
            r#type: "Warning".into(),
            reason: "Failed".into(),
            message: "first\nsecond".into(),
            field_path: String::new(),
            count: 3,
        };
        assert_eq!(
            render(&[event], 5_000_000_000),
            "LAST SEEN  TYPE     REASON  POD  FIELD  MESSAGE\n5s (x3)    Warning  Failed  web  –      first second\n"
        );
        assert_eq!(render(&[], 0), "no events\n");
    }
}
