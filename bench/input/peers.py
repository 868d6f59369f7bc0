"""One process of a peer: a member, or what serves the members. Each is set up as its documentation advises.

    python -m bench.input.peers SYSTEM member|server --records FILE --members N --place I --threads T --port P

It runs under the interpreter that has the peer installed, and needs nothing of commplan but this folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.input.consumers import Consumer
from bench.input.records import SIDE, Packed, decode
from bench.input.team import answer, cannot, serve

BATCH = 64


def grain_member(options: Any) -> None:
    """Grain's MapDataset with a thread for each core: every member reads and decodes for itself.

    https://google-grain.readthedocs.io: decoding with Pillow lets go of the interpreter's lock, for which
    Grain advises threads."""
    grain: Any = importlib.import_module("grain")
    records = Packed(options.records)
    consumer = Consumer("ids", BATCH)
    reading = grain.ReadOptions(num_threads=options.threads, prefetch_buffer_size=2 * BATCH)

    def epoch(number: int = 0) -> dict[str, Any]:
        data = grain.MapDataset.source(records).seed(17 + number).shuffle().map(decode)
        for batch in data.to_iter_dataset(reading).batch(BATCH):
            consumer(batch)
        return consumer.epoch(len(records))

    _epochs(epoch)


def tf_server(options: Any) -> None:
    """The dispatcher and the worker of tf.data service, in one process."""
    tf: Any = importlib.import_module("tensorflow")
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=options.port))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    serve(port=options.port, kept=[str(worker), str(dispatcher)])


def tf_records(path: Path) -> Path:
    """The packed records as a TFRecord file, what tf.data reads best."""
    tf: Any = importlib.import_module("tensorflow")
    place = path.with_suffix(".tfrecord")
    if not place.exists():
        partial = place.with_suffix(f".{os.getpid()}.part")  # several members may write it at once
        with tf.io.TFRecordWriter(str(partial)) as file:
            packed = Packed(path)
            for number in range(len(packed)):
                file.write(packed[number])
        partial.rename(place)
    return place


def tf_batches(path: Path, port: int, place: int) -> Iterator[Any]:
    """Batches u8 [64, 224, 224, 3] and the numbers of their records, from tf.data service: all members read
    from one job, through its cache between trainers.

    https://www.tensorflow.org/api_docs/python/tf/data/experimental/service, "Sharing tf.data service with
    concurrent trainers": the dataset must be endless, and what a slow trainer misses it does not get."""
    tf: Any = importlib.import_module("tensorflow")
    service = tf.data.experimental.service

    def made(record: Any) -> Any:
        number = tf.io.decode_raw(tf.strings.substr(record, 0, 4), tf.int32)[0]
        jpeg = tf.strings.substr(record, 4, tf.strings.length(record) - 4)
        picture = tf.io.decode_jpeg(jpeg, channels=3)
        shape = tf.shape(picture)
        side = tf.minimum(shape[0], shape[1])
        cut = tf.image.crop_to_bounding_box(
            picture, (shape[0] - side) // 2, (shape[1] - side) // 2, side, side
        )
        small = tf.image.resize(cut, (SIDE, SIDE), method="bilinear")
        return tf.cast(small, tf.uint8), number

    data = tf.data.TFRecordDataset(str(tf_records(path)))
    data = data.repeat().map(made, num_parallel_calls=tf.data.AUTOTUNE)
    data = data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    data = data.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=f"grpc://localhost:{port}",
            job_name="shared",
            cross_trainer_cache=service.CrossTrainerCache(trainer_id=f"member-{place}"),
        )
    ).prefetch(tf.data.AUTOTUNE)
    return iter(data.as_numpy_iterator())


def tf_member(options: Any) -> None:
    """A member of tf.data service."""
    count = len(Packed(options.records))
    consumer = Consumer("ids", BATCH)
    batches = tf_batches(options.records, options.port, options.place)

    def epoch(_: int = 0) -> dict[str, Any]:
        for _ in range(count // BATCH):
            pixels, ids = next(batches)
            consumer(pixels, ids.view(np.uint32))
        return consumer.epoch(count)

    _epochs(epoch)


def tensorsocket_server(options: Any) -> None:
    """TensorSocket's producer, with its defaults, around a torch DataLoader with a worker for each core.

    Eight batches of the loader are sent as one, which members take in batches of their own size. So the
    loader's have an eighth of the members' rows. Workers live for all epochs: their CPU time is counted.
    """
    torch_data: Any = importlib.import_module("torch.utils.data")
    tensorsocket: Any = importlib.import_module("tensorsocket")
    loader = torch_data.DataLoader(
        _Torch(options.records),
        batch_size=BATCH // 8,
        shuffle=True,
        num_workers=len(os.sched_getaffinity(0)),
        persistent_workers=True,
    )
    producer = tensorsocket.TensorProducer(loader, **ports(options.port))

    def produce() -> None:
        while True:
            for _ in producer:
                pass

    threading.Thread(target=produce, daemon=True).start()
    serve(port=options.port)


def ports(port: int) -> dict[str, Any]:
    """TensorSocket's, from `port` on."""
    return {"port": port, "ack_port": port + 1, "heart_ports": (port + 2, port + 3)}


class _Torch:
    """The records as a map-style data set of pictures and numbers."""

    def __init__(self, path: Path) -> None:
        self._records = Packed(path)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Any:
        torch: Any = importlib.import_module("torch")
        return torch.from_numpy(decode(self._records[number])), number


def tensorsocket_member(options: Any) -> None:
    """A consumer of TensorSocket; an epoch is over when it says so."""
    tensorsocket: Any = importlib.import_module("tensorsocket")
    count = len(Packed(options.records))
    consumer = Consumer(options.consumer, BATCH)
    batches: Any = tensorsocket.TensorConsumer(batch_size=BATCH, **ports(options.port))

    def epoch(_: int = 0) -> dict[str, Any]:
        for pixels, _numbers in batches:
            consumer(pixels.numpy())
        return consumer.epoch(count)

    _epochs(epoch)


def _epochs(epoch: Callable[[int], dict[str, Any]]) -> None:
    """One epoch to get warm, then what is asked for."""
    number = iter(range(1 << 30))
    epoch(next(number))
    answer(lambda: epoch(next(number)))


MODULES = {"grain": "grain", "tf_service": "tensorflow", "tensorsocket": "tensorsocket"}
ROLES: dict[tuple[str, str], Callable[[Any], None]] = {
    ("grain", "member"): grain_member,
    ("tf_service", "server"): tf_server,
    ("tf_service", "member"): tf_member,
    ("tensorsocket", "server"): tensorsocket_server,
    ("tensorsocket", "member"): tensorsocket_member,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("system", choices=MODULES)
    parser.add_argument("role", choices=("member", "server"))
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--place", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--consumer", default="ids", help="of TensorSocket's members; the others look at ids")
    options = parser.parse_args()
    if importlib.util.find_spec(MODULES[options.system]) is None:
        cannot(f"{MODULES[options.system]} is not installed")
        return
    ROLES[options.system, options.role](options)


if __name__ == "__main__":
    main()
