//! `quintctl devices`: the resources of device plugins, and the containers that hold their devices.

use quintctl_text::{NOTHING, clean, or_nothing, several, short_name, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::devices_client::DevicesClient;
use quintlet_proto::podsync::v1::{
    DeviceHolder, DevicePluginState, DeviceResource, ListDevicesReply, ListDevicesRequest,
};
use serde_json::{Value, json};

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Number of devices of a container in the table.
const SHOWN: usize = 4;

/// Lists the devices.
///
/// # Errors
/// pod-sync does not answer, or the output cannot be written.
pub(crate) async fn run(paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = DevicesClient::new(peer.channel().await?);
    let reply = peer.list(client.list(ListDevicesRequest {})).await?;
    print(format.render(&data(&reply), |wide| render(&reply, wide))?)
}

/// Formats the table of resources, and that of the containers that hold devices; `wide` adds all devices and
/// the UIDs of the pods.
#[must_use]
pub(crate) fn render(reply: &ListDevicesReply, wide: bool) -> String {
    if reply.resources.is_empty() {
        return "no device plugin has registered\n".to_owned();
    }
    let header = ["RESOURCE", "CAPACITY", "HEALTHY", "ALLOCATED", "PLUGIN", "LAST ERROR"];
    let row = |resource: &DeviceResource| {
        let DeviceResource { name, capacity, healthy, allocated, error, .. } = resource;
        let numbers = [capacity, healthy, allocated].map(ToString::to_string);
        let texts = [clean(name)].into_iter().chain(numbers);
        texts.chain([plugin(resource), clean(error)]).collect()
    };
    let mut out = table(&header, &reply.resources.iter().map(row).collect::<Vec<_>>());
    if !reply.holders.is_empty() {
        out.push('\n');
        let mut header = vec!["POD", "CONTAINER", "RESOURCE", "DEVICES"];
        if wide {
            header.push("POD UID");
        }
        let row = |holder: &DeviceHolder| holder_row(holder, wide);
        out.push_str(&table(&header, &reply.holders.iter().map(row).collect::<Vec<_>>()));
    }
    out
}

fn holder_row(holder: &DeviceHolder, wide: bool) -> Vec<String> {
    let shown = if wide { usize::MAX } else { SHOWN };
    let devices = several(&holder.devices, shown, holder.count);
    let mut row = vec![
        short_name(&holder.pod, &holder.pod_uid),
        clean(&holder.container),
        clean(&holder.resource),
        or_nothing(&devices),
    ];
    if wide {
        row.push(clean(&holder.pod_uid));
    }
    row
}

/// Returns the socket of a plugin, and its state unless it has listed its devices.
fn plugin(resource: &DeviceResource) -> String {
    let socket = clean(&resource.socket);
    match resource.plugin() {
        DevicePluginState::Serving => socket,
        DevicePluginState::Registered => format!("{socket} (no list of devices yet)"),
        DevicePluginState::Away => "not registered".to_owned(),
        DevicePluginState::Removed => "gone for more than 5 minutes".to_owned(),
        DevicePluginState::Unspecified => NOTHING.to_owned(),
    }
}

/// Returns the devices for JSON and YAML output.
fn data(reply: &ListDevicesReply) -> Value {
    let resource = |resource: &DeviceResource| {
        let DeviceResource { name, socket, capacity, healthy, allocated, error, .. } = resource;
        let plugin = match resource.plugin() {
            DevicePluginState::Serving => "Serving",
            DevicePluginState::Registered => "Registered",
            DevicePluginState::Away => "Away",
            DevicePluginState::Removed => "Removed",
            DevicePluginState::Unspecified => "Unknown",
        };
        json!({"name": name, "plugin": plugin, "socket": socket, "capacity": capacity, "healthy": healthy, "allocated": allocated, "error": error})
    };
    let holder = |holder: &DeviceHolder| {
        let DeviceHolder { pod, pod_uid, container, resource, count, devices } = holder;
        json!({"pod": pod, "podUid": pod_uid, "container": container, "resource": resource, "count": count, "devices": devices})
    };
    let resources: Vec<Value> = reply.resources.iter().map(resource).collect();
    json!({"resources": resources, "holders": reply.holders.iter().map(holder).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(name: &str, plugin: DevicePluginState, socket: &str) -> DeviceResource {
        let (name, socket) = (name.to_owned(), socket.to_owned());
        let plugin = plugin.into();
        DeviceResource { name, plugin, socket, capacity: 8, healthy: 7, allocated: 6, error: String::new() }
    }

    fn holder(pod: &str, devices: &[&str], count: u64) -> DeviceHolder {
        DeviceHolder {
            pod_uid: "uid-1".to_owned(),
            pod: pod.to_owned(),
            container: "main".to_owned(),
            resource: "a.com/gpu".to_owned(),
            count,
            devices: devices.iter().map(|id| (*id).to_owned()).collect(),
        }
    }

    #[test]
    fn the_tables_have_the_plugin_of_each_resource_and_the_devices_of_each_container() {
        let failed = DeviceResource {
            error: "ListAndWatch ended:\n it broke".to_owned(),
            ..resource("a.com/nic", DevicePluginState::Away, "")
        };
        let reply = ListDevicesReply {
            resources: vec![
                resource("a.com/gpu", DevicePluginState::Serving, "/d/gpu.sock"),
                failed,
                resource("a.com/slow", DevicePluginState::Registered, "/d/slow.sock"),
                resource("b.com/old", DevicePluginState::Removed, ""),
            ],
            holders: vec![
                holder("default/web", &["g1"], 1),
                holder("other/db", &["g2", "g3", "g4", "g5", "g6"], 100),
                holder("", &[], 0),
            ],
        };
        let expected = "\
RESOURCE    CAPACITY  HEALTHY  ALLOCATED  PLUGIN                                 LAST ERROR
a.com/gpu   8         7        6          /d/gpu.sock
a.com/nic   8         7        6          not registered                         ListAndWatch ended:  it broke
a.com/slow  8         7        6          /d/slow.sock (no list of devices yet)
b.com/old   8         7        6          gone for more than 5 minutes

POD       CONTAINER  RESOURCE   DEVICES
web       main       a.com/gpu  g1
other/db  main       a.com/gpu  g2, g3, g4, g5 and 96 more
uid-1     main       a.com/gpu  –
";
        assert_eq!(render(&reply, false), expected);
        let wide = render(&reply, true);
        assert!(wide.contains("g2, g3, g4, g5, g6 and 95 more  uid-1"), "{wide}");
        assert_eq!(render(&ListDevicesReply::default(), false), "no device plugin has registered\n");
    }

    #[test]
    fn data_names_the_state_of_each_plugin() {
        let names = [
            (DevicePluginState::Serving, "Serving"),
            (DevicePluginState::Registered, "Registered"),
            (DevicePluginState::Away, "Away"),
            (DevicePluginState::Removed, "Removed"),
        ];
        for (state, name) in names {
            let resources = vec![resource("a.com/gpu", state, "/d/gpu.sock")];
            let reply = ListDevicesReply { resources, holders: vec![holder("default/web", &["g1"], 1)] };
            let value = data(&reply);
            assert_eq!(value["resources"][0]["plugin"], name);
            assert_eq!(
                (&value["holders"][0]["podUid"], &value["holders"][0]["count"]),
                (&"uid-1".into(), &1.into())
            );
        }
    }
}
