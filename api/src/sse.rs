//! Streams of events (WHATWG HTML, section 9.2, "Server-sent events"). Each event goes out as it was written: the
//! framework's own answer copies all of them through a buffer that every open stream would keep.

use std::{io, marker::PhantomData, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream::BoxStream};
use poem::{Body, IntoResponse, Response, web::sse::Event};
use poem_openapi::{
    ApiResponse,
    payload::{EventStream, Payload},
    registry::{MetaResponses, MetaSchemaRef, Registry},
    types::{ToJSON, Type},
};
use tokio::time::{Instant, Interval, interval_at};

/// Between comments that keep an idle stream open.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Events whose data are `T` as JSON.
pub(crate) struct Sse<T> {
    events: BoxStream<'static, Event>,
    data: PhantomData<fn() -> T>,
}

impl<T> Sse<T> {
    /// These events, with comments while there are none.
    pub(crate) fn new(events: impl Stream<Item = Event> + Send + 'static) -> Self {
        Self { events: events.boxed(), data: PhantomData }
    }
}

/// Events as they are sent, and what is said between them.
struct Sent {
    events: BoxStream<'static, Event>,
    heart: Interval,
}

impl Sent {
    async fn next(mut self) -> Option<(io::Result<Bytes>, Self)> {
        let bytes = tokio::select! {
            biased;
            event = self.events.next() => {
                self.heart.reset();
                Bytes::from(event?.to_string())
            }
            _ = self.heart.tick() => Bytes::from_static(b":\n\n"),
        };
        Some((Ok(bytes), self))
    }
}

impl<T> IntoResponse for Sse<T> {
    fn into_response(self) -> Response {
        let heart = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        let sent = futures::stream::unfold(Sent { events: self.events, heart }, Sent::next);
        Response::builder()
            .content_type("text/event-stream")
            .header("x-accel-buffering", "no")
            .header("cache-control", "no-cache")
            .body(Body::from_bytes_stream(sent))
    }
}

/// What the document says of such a stream.
type Documented<T> = EventStream<BoxStream<'static, T>>;

impl<T: Type + ToJSON + 'static> Payload for Sse<T> {
    const CONTENT_TYPE: &'static str = Documented::<T>::CONTENT_TYPE;

    fn schema_ref() -> MetaSchemaRef {
        Documented::<T>::schema_ref()
    }

    fn register(registry: &mut Registry) {
        T::register(registry);
    }
}

impl<T: Type + ToJSON + 'static> ApiResponse for Sse<T> {
    fn meta() -> MetaResponses {
        Documented::<T>::meta()
    }

    fn register(registry: &mut Registry) {
        T::register(registry);
    }
}
