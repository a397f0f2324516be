//! The service Claims of podsync.v1.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use pod_sync_claims::{ClaimInventory, ClaimKey, ClaimRecord, ClaimStateView, Claims, DriverView};
use pod_sync_worker::context::Reporting;
use quintlet_kit::messages::{self, Bounded};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::claims_server;
use tonic::{Request, Response, Status};

use crate::listing::{MOST_NAMES, count};

/// Lists the claims of the node with the drivers that have prepared them and the pods that use them.
#[derive(Debug, Clone)]
pub(crate) struct ClaimLists {
    pub(crate) claims: Claims,
    pub(crate) reporting: Arc<Reporting>,
}

#[tonic::async_trait]
impl claims_server::Claims for ClaimLists {
    type ListStream = Bounded<wire::ListClaimsReply>;

    async fn list(&self, _: Request<wire::ListClaimsRequest>) -> Result<Response<Self::ListStream>, Status> {
        self.reporting.views.restored().await;
        let names = self.reporting.views.names();
        let mut known = self.claims.drivers();
        let claims = self.claims.read(|inventory| {
            for (_, record, _) in inventory.claims() {
                for driver in record.drivers.keys() {
                    known.entry(driver.clone()).or_default();
                }
            }
            claims(inventory, &names)
        });
        let drivers = messages::chunks(drivers(known));
        let drivers = drivers.map(|drivers| wire::ListClaimsReply { drivers, claims: Vec::new() });
        let claims = messages::chunks(claims);
        let claims = claims.map(|claims| wire::ListClaimsReply { drivers: Vec::new(), claims });
        Ok(Response::new(Bounded::of_chunks("Claims.List", drivers.chain(claims))))
    }
}

fn drivers(known: BTreeMap<String, DriverView>) -> Vec<wire::ClaimDriver> {
    let plugin = |(endpoint, is_connected): (PathBuf, bool)| wire::ClaimDriverPlugin {
        endpoint: endpoint.display().to_string(),
        is_connected,
    };
    let driver = |(name, DriverView { endpoints, error }): (String, DriverView)| wire::ClaimDriver {
        name,
        plugins: endpoints.into_iter().map(plugin).collect(),
        error: error.unwrap_or_default(),
    };
    known.into_iter().map(driver).collect()
}

fn claims(inventory: &ClaimInventory, pods: &HashMap<PodUid, String>) -> Vec<wire::ClaimView> {
    let view = |(key, record, state): (&ClaimKey, &ClaimRecord, ClaimStateView)| {
        let state = match state {
            ClaimStateView::Uncertain => wire::ClaimState::Uncertain,
            ClaimStateView::Prepared => wire::ClaimState::Prepared,
            ClaimStateView::Busy => wire::ClaimState::Busy,
        };
        let user = |uid: &String| wire::ClaimUser {
            pod_uid: uid.clone(),
            pod: pods.get(uid.as_str()).cloned().unwrap_or_default(),
        };
        let cdi: Vec<&String> = record.drivers.values().flatten().flat_map(|device| &device.cdi).collect();
        wire::ClaimView {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            uid: record.uid.clone(),
            state: state.into(),
            drivers: record.drivers.keys().cloned().collect(),
            users: record.pods.iter().take(MOST_NAMES).map(user).collect(),
            user_count: count(record.pods.len()),
            cdi_devices: cdi.iter().take(MOST_NAMES).map(|name| (*name).clone()).collect(),
            cdi_device_count: count(cdi.len()),
        }
    };
    inventory.claims().map(view).collect()
}
