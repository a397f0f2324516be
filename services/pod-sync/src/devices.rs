//! The service Devices of podsync.v1.

use std::collections::HashMap;
use std::sync::Arc;

use pod_sync_devices::{DeviceInventory, Devices, PluginPhaseView, PluginView};
use pod_sync_layout::ResourceCount;
use pod_sync_worker::context::Reporting;
use quintlet_kit::messages::{self, Bounded};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::devices_server;
use tonic::{Request, Response, Status};

use crate::listing::{MOST_NAMES, count};

/// Lists the devices of the node with the pods that hold them.
#[derive(Debug, Clone)]
pub(crate) struct DeviceLists {
    pub(crate) devices: Devices,
    pub(crate) reporting: Arc<Reporting>,
}

#[tonic::async_trait]
impl devices_server::Devices for DeviceLists {
    type ListStream = Bounded<wire::ListDevicesReply>;

    async fn list(&self, _: Request<wire::ListDevicesRequest>) -> Result<Response<Self::ListStream>, Status> {
        self.reporting.views.restored().await;
        let names = self.reporting.views.names();
        let (resources, holders) =
            self.devices.read(|inventory, plugin| (resources(inventory, plugin), holders(inventory, &names)));
        let resources = messages::chunks(resources);
        let resources = resources.map(|resources| wire::ListDevicesReply { resources, holders: Vec::new() });
        let holders = messages::chunks(holders);
        let holders = holders.map(|holders| wire::ListDevicesReply { resources: Vec::new(), holders });
        Ok(Response::new(Bounded::of_chunks("Devices.List", resources.chain(holders))))
    }
}

fn resources(inventory: &DeviceInventory, plugin: &dyn Fn(&str) -> PluginView) -> Vec<wire::DeviceResource> {
    let capacity = inventory.capacity();
    let mut names: Vec<&str> = inventory.resources().chain(inventory.held().resources()).collect();
    names.sort_unstable();
    names.dedup();
    let resource = |name: &str| {
        let ResourceCount { capacity, allocatable } = capacity.get(name).copied().unwrap_or_default();
        let PluginView { socket, error } = plugin(name);
        let state = match inventory.phase(name) {
            PluginPhaseView::Away => wire::DevicePluginState::Away,
            PluginPhaseView::Registered => wire::DevicePluginState::Registered,
            PluginPhaseView::Serving => wire::DevicePluginState::Serving,
            PluginPhaseView::Removed => wire::DevicePluginState::Removed,
        };
        wire::DeviceResource {
            name: name.to_owned(),
            plugin: state.into(),
            socket: socket.map(|socket| socket.display().to_string()).unwrap_or_default(),
            capacity: count(capacity),
            healthy: count(allocatable),
            allocated: count(inventory.held().in_use(name).len()),
            error: error.unwrap_or_default(),
        }
    };
    names.into_iter().map(resource).collect()
}

fn holders(inventory: &DeviceInventory, pods: &HashMap<PodUid, String>) -> Vec<wire::DeviceHolder> {
    let holder = |(pod, container, resource, held): (&str, &str, &str, &pod_sync_devices::Allocation)| {
        let ids = held.ids();
        wire::DeviceHolder {
            pod_uid: pod.to_owned(),
            pod: pods.get(pod).cloned().unwrap_or_default(),
            container: container.to_owned(),
            resource: resource.to_owned(),
            count: count(ids.len()),
            devices: ids.iter().take(MOST_NAMES).map(ToString::to_string).collect(),
        }
    };
    let mut holders: Vec<_> = inventory.held().all().map(holder).collect();
    holders.sort_by(|a, b| (&a.pod, &a.pod_uid).cmp(&(&b.pod, &b.pod_uid)));
    holders
}
